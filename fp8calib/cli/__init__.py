"""The command line. One file a command; bodies import late, call one function, render."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from fp8calib import __version__
from fp8calib.cli.command_line import remember

app = typer.Typer(
    name="fp8calib",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    help="FP8 KV-cache scales for Hugging Face models, in checkpoints that vLLM reads.",
    epilog="Exit codes: 0 ok; 1 a check failed; 2 wrong usage or an input refused; 3 a bug in "
    "fp8calib; 130 interrupted.",
)

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Set before commands run; the entry point reads it when one fails.
_debug = False


def _print_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    global _debug
    _debug = debug


def main(args: list[str] | None = None) -> None:
    """Run the command line and exit with the documented code; never shows a traceback by itself."""
    from fp8calib.errors import Fp8CalibError

    try:
        words = sys.argv[1:] if args is None else args
        remember(words)
        given = list(_with_lists_joined(words))
        status = _run(given)
        if status == 130:  # what typer makes of Ctrl-C
            _fail("interrupted", 130)
        sys.stdout.flush()
        sys.exit(status if isinstance(status, int) else 0)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", 130)
    except Fp8CalibError as problem:
        _fail(_one_line(str(problem)), problem.exit_code)
    except BrokenPipeError:
        sys.exit(_nobody_reads())
    except Exception as problem:
        if isinstance(problem, OSError) and problem.errno in _FULL:
            _nobody_reads()
            where = problem.filename or "standard output or a temporary file"
            _fail(f"cannot write to {where}: {problem.strerror}", 2)
        if hasattr(problem, "exit_code") and hasattr(problem, "format_message"):  # click's own
            _fail(problem.format_message(), 2)
        _fail(
            f"unexpected {type(problem).__name__}: {problem}\nThis is a bug in fp8calib; "
            "`fp8calib --debug ...` shows where. Please report it.",
            3,
        )


def _one_line(message: str) -> str:
    """A message as one line, whatever a file's name or content has put into it."""
    message = re.sub(r"\s*[\n\r\v\f\x1c-\x1e\x85\u2028\u2029]\s*", " ", message)
    shown = "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in message)
    return shown if len(shown) < 2000 else f"{shown[:2000]} ..."


def _nobody_reads() -> int:
    """Let nothing be written to standard output any more; what a shell says of a broken pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 141


def _run(args: list[str]) -> Any:
    """What the command returns. typer ends a command whose output nobody reads any more with exit
    code 1, which means a failed check here: 141 is what a shell says of a broken pipe."""
    try:
        return app(args=args, standalone_mode=False)
    except SystemExit as stop:
        if not isinstance(stop.__context__, BrokenPipeError):
            raise
        return _nobody_reads()


def _with_lists_joined(args: Sequence[str]) -> Iterator[str]:
    """vLLM's form of a list, `--kv-cache-dtype-skip-layers 0 5 sliding_window`, as one word:
    an option here takes one value, and the flag that vLLM takes should work as it is."""
    is_list, values = False, list[str]()
    args = list(args)
    ours = args.index("--") if "--" in args else len(args)  # what follows is for vLLM as it is
    for word in args[:ours]:
        if is_list and re.fullmatch(r"-?\d+|sliding_window", word):
            values.append(word)
            continue
        if values:
            yield ",".join(values)
        yield word
        is_list, values = word in ("--kv-cache-dtype-skip-layers", "--skip-layers"), []
    if values:
        yield ",".join(values)
    yield from args[ours:]


def _fail(message: str, code: int) -> None:
    if _debug and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    from fp8calib.console import error

    error(message)
    sys.exit(code)


from fp8calib.cli import (  # noqa: E402  (they register themselves)
    calibrate,  # noqa: F401
    chat,  # noqa: F401
    compare,  # noqa: F401
    convert,  # noqa: F401
    doctor,  # noqa: F401
    inspect,  # noqa: F401
    merge,  # noqa: F401
    models,  # noqa: F401
    rescale,  # noqa: F401
    run,  # noqa: F401
    sensitivity,  # noqa: F401
    serve,  # noqa: F401
    verify,  # noqa: F401
)
