"""To and from the Hub: huggingface_hub's own client, and a Hub that is a function."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from fake_checkpoints import equal, write_source
from test_convert import random_set

from fp8calib.checkpoint import inspect, read_scales
from fp8calib.checkpoint.amend import amend
from fp8calib.checkpoint.conversion import merge
from fp8calib.checkpoint.formats import ScaleFile, own_json
from fp8calib.checkpoint.hub import check_push, push
from fp8calib.cli import main
from fp8calib.errors import UserError
from fp8calib.models import resolve_model

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """Answers what the client asks of huggingface.co, for one user and any repository."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {}
        self.private: dict[str, bool] = {}
        self.requests: list[str] = []
        self.status = 200
        self.may_write = True

    def __call__(self, request: httpx.Request) -> httpx.Response:
        path = request.url.path
        self.requests.append(f"{request.method} {path}")
        if self.status != 200:
            return httpx.Response(self.status, json={"error": "no"}, request=request)
        if path == "/api/whoami-v2":
            return httpx.Response(200, json={"name": "me", "type": "user", "orgs": []})
        if path == "/api/repos/create":
            if not self.may_write:
                return httpx.Response(403, json={"error": "forbidden"}, request=request)
            asked = json.loads(request.content)
            repo = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.files.setdefault(repo, {})
            self.private[repo] = asked.get("visibility") == "private"
            return httpx.Response(200, json={"url": f"https://huggingface.co/{repo}"})
        if path == "/api/validate-yaml":
            return httpx.Response(200, json={"errors": [], "warnings": []})
        if path.startswith("/api/models/"):
            return self._models(request, path.removeprefix("/api/models/").split("/"))
        return self._file(request, path)

    def _models(self, request: httpx.Request, parts: list[str]) -> httpx.Response:
        repo, action = "/".join(parts[:2]), parts[2] if len(parts) > 2 else ""
        if action == "preupload":
            asked = json.loads(request.content)["files"]
            answers = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False}
                for file in asked
            ]
            return httpx.Response(200, json={"files": answers})
        if action == "commit":
            for line in request.content.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    self.files[repo][entry["value"]["path"]] = content
            url = f"https://huggingface.co/{repo}/commit/{SHA}"
            return httpx.Response(200, json={"commitOid": SHA, "commitUrl": url})
        if repo not in self.files:
            headers = {"X-Error-Code": "RepoNotFound"}
            return httpx.Response(404, headers=headers, json={}, request=request)
        if action == "tree":
            entries = [
                {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                for name, content in self.files[repo].items()
            ]
            return httpx.Response(200, json=entries)
        siblings = [{"rfilename": name} for name in self.files[repo]]
        return httpx.Response(200, json={"id": repo, "sha": SHA, "siblings": siblings})

    def _file(self, request: httpx.Request, path: str) -> httpx.Response:
        owner, name, _, _, file = path.lstrip("/").split("/", 4)
        content = self.files[f"{owner}/{name}"][file]
        headers = {
            "X-Repo-Commit": SHA,
            "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
            "Content-Length": str(len(content)),
        }
        body = b"" if request.method == "HEAD" else content
        return httpx.Response(200, headers=headers, content=body, request=request)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    from huggingface_hub import constants, set_client_factory
    from huggingface_hub.utils import _http

    answering = Hub()
    earlier = _http._GLOBAL_CLIENT_FACTORY
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_TOKEN", "hf_token_of_a_test")
    set_client_factory(
        lambda: httpx.Client(
            transport=httpx.MockTransport(answering),
            event_hooks={"request": [_http.hf_request_event_hook]},
            follow_redirects=True,
        )
    )
    yield answering
    set_client_factory(earlier)


def made(folder: Path, name: str | None = None) -> Path:
    folder.mkdir()
    source = write_source(folder / "source")
    card = "---\nlicense: apache-2.0\nlicense_name: x\nlanguage: [en]\n---\n# Model\n"
    (source / "README.md").write_text(card)
    (source / "LICENSE").write_text("the licence")
    (folder / "s.json").write_bytes(own_json.write(ScaleFile(random_set("tensor"))))
    merge(source, folder / "s.json", folder / "made", name=name)
    return folder / "made"


def test_what_is_pushed_is_what_was_made(hub: Hub, tmp_path: Path) -> None:
    folder = made(tmp_path / "a", name="me/model-fp8-kv")
    check_push("me/model-fp8-kv")
    assert push(folder, "me/model-fp8-kv") == "https://huggingface.co/me/model-fp8-kv"
    there = hub.files["me/model-fp8-kv"]
    mine = {file.name: file.read_bytes() for file in folder.iterdir()}
    assert {name: content for name, content in there.items() if name != ".gitattributes"} == mine
    assert there["LICENSE"] == b"the licence" and hub.private == {"me/model-fp8-kv": False}


def test_the_card_carries_the_licence_and_the_commands(tmp_path: Path) -> None:
    card = (made(tmp_path / "a", name="me/model-fp8-kv") / "README.md").read_text()
    matter = yaml.safe_load(card.split("---\n")[1])
    assert (matter["license"], matter["license_name"], matter["language"]) == (
        "apache-2.0", "x", ["en"]
    )  # fmt: skip
    assert "vllm serve me/model-fp8-kv\n" in card
    assert "python -m sglang.launch_server --model-path me/model-fp8-kv\n" in card
    assert str(tmp_path) not in card


def test_an_amended_card_keeps_what_it_declares(tmp_path: Path) -> None:
    """Its name on the Hub, and what its owner has added, in a folder of whatever name."""
    folder = made(tmp_path / "a", name="me/model-fp8-kv")
    card = folder / "README.md"
    before = card.read_text()
    amend(folder, note=1)
    assert card.read_text() == before
    added = before.replace("---\n", "---\nthumbnail: x.png\nbase_model: us/model\n", 1)
    added += "\n## Licence\n\nAsk me.\n\n## Thanks\n\nto you.\n"
    card.write_text(added)
    amend(folder, skip_layers=["0"])
    amended = card.read_text()
    front, body = yaml.safe_load(amended.split("---\n")[1]), amended.split("---\n", 2)[2]
    assert front == yaml.safe_load(added.split("---\n")[1])
    assert body.startswith("\n# me/model-fp8-kv\n\nus/model with calibrated scales")
    assert "vllm serve me/model-fp8-kv --kv-cache-dtype-skip-layers 0\n" in body
    assert body.endswith("\n## Licence\n\nAsk me.\n\n## Thanks\n\nto you.\n")
    amend(folder, skip_layers=[])
    amend(folder, skip_layers=["0"])
    assert card.read_text() == amended  # nothing piles up


def test_a_card_that_is_gone_is_made_anew(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    (folder / "README.md").unlink()
    amend(folder, note=1)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "vllm serve made\n" in card


def test_it_comes_back_from_the_hub_and_from_the_cache(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made(tmp_path / "a")
    push(folder, "me/model", private=True)
    assert hub.private == {"me/model": True}
    snapshot = resolve_model("me/model")
    assert snapshot.parent.name == "snapshots" and (snapshot / "config.json").is_symlink()
    assert equal(read_scales(snapshot), read_scales(folder))
    assert inspect("me/model").ok and inspect(snapshot).ok
    asked = len(hub.requests)
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert inspect("me/model").ok
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main(["inspect", "me/another"])
    err = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and "HF_HUB_OFFLINE" in err
    assert len(hub.requests) == asked


def test_converting_from_the_hub_and_pushing_the_result(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    push(made(tmp_path / "a"), "me/model")
    out = tmp_path / "out"
    command = ["convert", "me/model", "--to", "modelopt", "-o", str(out), "--json"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--push-to-hub", "me/modelopt", "--private"])
    shown = json.loads(capsys.readouterr().out)
    assert stop.value.code == 0 and shown["url"] == "https://huggingface.co/me/modelopt"
    assert "hf_quant_config.json" in hub.files["me/modelopt"] and hub.private["me/modelopt"]


def test_calibrating_and_pushing(
    hub: Hub, tiny: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.txt").write_text("some text to calibrate with, and a little more of it\n" * 4)
    command = ["calibrate", str(tiny()), "-o", str(tmp_path / "out"), "--max-seq-len", "32"]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--dataset", str(tmp_path / "t.txt"), "--push-to-hub", "me/model"])
    assert stop.value.code == 0 and "pushed to https://huggingface.co/me/model" in (
        capsys.readouterr().err
    )
    assert b"vllm serve me/model\n" in hub.files["me/model"]["README.md"]


def trouble(hub: Hub, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    from huggingface_hub import constants

    if kind == "offline":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    elif kind == "no-token":
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/no/such/file")
    else:
        hub.status = int(kind)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("offline", "HF_HUB_OFFLINE is set"),
        ("no-token", "hf auth login"),
        ("401", "the token is not valid"),
        ("500", "500"),
    ],
)
def test_trouble_is_told_before_the_work_in_one_line(
    kind: str, message: str, hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    trouble(hub, monkeypatch, kind)
    source = made(tmp_path / "a")
    out = tmp_path / "out"
    command = ["convert", str(source), "--to", "modelopt", "-o", str(out)]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--push-to-hub", "me/x"])
    err = capsys.readouterr().err.strip()
    assert stop.value.code == 2 and len(err.splitlines()) == 1 and message in err
    assert "hf_token_of_a_test" not in err and not out.exists()


def test_what_was_made_stays_when_the_push_fails(hub: Hub, tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    hub.may_write = False
    with pytest.raises(UserError, match=r"may not write to me/x; the checkpoint is in .*hf upload"):
        push(folder, "me/x")
    assert inspect(folder).ok


@pytest.mark.parametrize("repo", ["x", "a/b/c", "../x/y", "a b/c", ""])
def test_names_of_no_repository(repo: str, hub: Hub) -> None:
    with pytest.raises(UserError, match="OWNER/NAME"):
        check_push(repo)
    assert hub.requests == []


def test_files_of_scales_are_not_pushed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command: list[Any] = ["convert", str(tmp_path), "--to", "json", "-o", str(tmp_path / "x")]
    with pytest.raises(SystemExit) as stop:
        main([*command, "--push-to-hub", "me/x"])
    assert stop.value.code == 2 and "json is a file of scales" in capsys.readouterr().err


def test_private_without_a_repository_is_refused() -> None:
    check_push(None)
    with pytest.raises(UserError, match="--private is for --push-to-hub"):
        check_push(None, private=True)
