"""A finished checkpoint on the Hugging Face Hub, through huggingface_hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8calib.errors import UserError

_REPO = re.compile(r"[\w.-]{1,96}/[\w.-]{1,96}")


def check_push(repo: str | None, private: bool = False) -> None:
    """Find out before any expensive work whether `repo` can be pushed to: its name, and the login.
    None is no push.

    Raises:
        UserError: one line saying what is in the way.
    """
    if repo is None:
        if private:
            raise UserError("--private is for --push-to-hub")
        return
    if not _REPO.fullmatch(repo):
        raise UserError(f"--push-to-hub {repo!r:.99}: a repository's name is OWNER/NAME")
    with _explained(repo):
        from huggingface_hub import HfApi

        HfApi().whoami()


def push(folder: Path, repo: str, private: bool = False) -> str:
    """Upload the files of `folder` to the model repository `repo`, made where there is none.

    Returns:
        The address of the repository.
    Raises:
        UserError: the Hub cannot be reached, or does not let us.
    """
    from huggingface_hub import HfApi

    left = f"; the checkpoint is in {folder}: `hf upload {repo} {shlex.quote(str(folder))}`"
    with _explained(repo, left):
        api = HfApi()
        url = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repo, folder_path=folder, commit_message="Calibrated FP8 KV-cache scales"
        )
    return str(url)


@contextmanager
def _explained(repo: str, left: str = "") -> Iterator[None]:
    import httpx
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalTokenNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        yield
    except LocalTokenNotFoundError:
        why = "not logged in: run `hf auth login` or set HF_TOKEN"
    except OfflineModeIsEnabled:
        why = "offline: HF_HUB_OFFLINE is set"
    except HFValidationError as problem:
        why = str(problem).splitlines()[0]
    except HfHubHTTPError as problem:
        status = problem.response.status_code if problem.response is not None else 0
        why = {
            401: "the token is not valid: run `hf auth login`",
            403: f"the token may not write to {repo}",
        }.get(status, str(problem).splitlines()[0])
    except (httpx.HTTPError, OSError) as problem:
        why = f"the Hub cannot be reached ({type(problem).__name__})"
    else:
        return
    raise UserError(f"cannot push to {repo}: {why}{left}") from None
