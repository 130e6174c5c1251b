"""The command line: parses arguments and calls the package. Users' mistakes are messages, ours are tracebacks.

Nothing heavy is imported here or by the verbs' files: `osfl --help` answers at once.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Callable
from difflib import get_close_matches
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from osfl.cli import (
    advise,
    audit,
    cache,
    check,
    client,
    compare,
    dashboard,
    demo,
    deploy,
    doctor,
    enroll,
    estimate,
    evaluate,
    exchange,
    export,
    forget,
    fuse,
    inspect,
    keys,
    ls,
    new,
    personalize,
    predict,
    receive,
    repair,
    report,
    results,
    run,
    server,
    show,
    verify,
)
from osfl.cli.options import Verb, examples
from osfl.cli.terminal import INTERRUPTED, complain, wants_json
from osfl.core.errors import FilesError, OsflError, UsageError

EXAMPLES = ("osfl demo", "osfl advise --sites 5 --images 4000 --kind medical", "osfl run --smoke")

app = typer.Typer(
    name="osfl",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    suggest_commands=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog=examples(EXAMPLES),
)


def _version(wanted: bool) -> None:
    if wanted:
        from osfl.core.version import __version__

        print(f"osfl {__version__}")
        raise typer.Exit


@app.callback()
def osfl(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")] = False,
) -> None:
    """One-shot federated learning: sites train one image classifier together, and each uploads exactly once."""


VERBS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "demo": (demo.demo, demo.EXAMPLES),
    "run": (run.run, run.EXAMPLES),
    "advise": (advise.advise, advise.EXAMPLES),
    "compare": (compare.compare, compare.EXAMPLES),
    "report": (report.report, report.EXAMPLES),
    "audit": (audit.audit, audit.EXAMPLES),
    "predict": (predict.predict, predict.EXAMPLES),
    "evaluate": (evaluate.evaluate, evaluate.EXAMPLES),
    "export": (export.export, export.EXAMPLES),
    "results": (results.results, results.EXAMPLES),
    "ls": (ls.ls, ls.EXAMPLES),
    "new": (new.new, new.EXAMPLES),
    "check": (check.check, check.EXAMPLES),
    "estimate": (estimate.estimate, estimate.EXAMPLES),
    "doctor": (doctor.doctor, doctor.EXAMPLES),
    "keys": (keys.keys, keys.EXAMPLES),
    "enroll": (enroll.enroll, enroll.EXAMPLES),
    "receive": (receive.receive, receive.EXAMPLES),
    "server": (server.server, server.EXAMPLES),
    "fuse": (fuse.fuse, fuse.EXAMPLES),
    "show": (show.show, show.EXAMPLES),
    "forget": (forget.forget, forget.EXAMPLES),
    "client": (client.client, client.EXAMPLES),
    "deploy": (deploy.deploy, deploy.EXAMPLES),
    "repair": (repair.repair, repair.EXAMPLES),
    "exchange": (exchange.exchange, exchange.EXAMPLES),
    "personalize": (personalize.personalize, personalize.EXAMPLES),
    "verify": (verify.verify, verify.EXAMPLES),
    "inspect": (inspect.inspect, inspect.EXAMPLES),
    "cache": (cache.cache, cache.EXAMPLES),
    "dashboard": (dashboard.dashboard, dashboard.EXAMPLES),
}
# Who asks for it, in the order of a round; a verb that nobody claims is anybody's.
PANELS = {
    "Simulate": ("demo", "advise", "run", "compare", "report", "audit", "estimate"),
    "Coordinator of a real round": (
        "new",
        "keys",
        "enroll",
        "deploy",
        "receive",
        "show",
        "dashboard",
        "server",
        "results",
        "fuse",
        "forget",
    ),
    "Site of a real round": ("check", "client", "inspect", "repair", "exchange", "personalize", "predict"),
    "Anybody": ("ls", "evaluate", "export", "verify", "doctor", "cache"),
}
_OWNER = {verb: panel for panel, verbs in PANELS.items() for verb in verbs}
_ORDER = list(_OWNER)
for verb in sorted(VERBS, key=lambda verb: _ORDER.index(verb) if verb in _ORDER else len(_ORDER)):
    function, shown = VERBS[verb]
    app.command(verb, cls=Verb, epilog=examples(shown), rich_help_panel=_OWNER.get(verb, "Anybody"))(function)


# The base of all the parser's own errors. It is click's class or typer's copy of it, depending on typer's version, so it is
# looked up and not imported.
PARSER_ERROR: type[Any] = next(base for base in reversed(typer.BadParameter.__mro__) if hasattr(base, "format_message"))


def main(arguments: list[str] | None = None) -> None:
    """Run one command and leave with its exit code: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted."""
    sys.exit(answer(sys.argv[1:] if arguments is None else arguments))


def answer(arguments: list[str]) -> int:
    as_json = wants_json(arguments)
    for stream in (sys.stdout, sys.stderr):  # an old terminal shows a question mark rather than a traceback
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        _check_system()
        _check_text(arguments)
        code = app(args=arguments, prog_name="osfl", standalone_mode=False)
    except PARSER_ERROR as error:
        return _misused(error, arguments, as_json)
    except OsflError as error:
        complain(str(error), error.as_json(), as_json)
        return error.exit_code
    except OSError as error:
        if error.errno not in REMEDIES:
            raise
        refused = _refused(error)
        complain(str(refused), refused.as_json(), as_json)
        return refused.exit_code
    if code == 130:  # the parser's code for Ctrl-C
        complain(INTERRUPTED, {"error": "Interrupted", "reason": INTERRUPTED}, as_json)
    return int(code or 0)


def _check_system() -> None:
    """Windows has no locks that die with their process, nor folders that can be synced; a round's promises rest on both."""
    if sys.platform == "win32":
        raise FilesError(
            "OSFL needs the file locks and durable renames of Linux or macOS, which Windows itself does not have",
            field="system",
            fix="Install it inside the Windows Subsystem for Linux (WSL 2), and keep the round's folder there.",
        )


def _check_text(arguments: list[str]) -> None:
    """Paths of a round are written into JSON, which holds text only."""
    for argument in arguments:
        if not _is_text(argument):
            raise UsageError(
                f"{argument!a} holds bytes that are no UTF-8", field="path", fix="Rename that file or folder, and try again."
            )


def _is_text(argument: str) -> bool:
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


# What a file system may answer to a user's paths; anything else would be a mistake of ours.
ELSEWHERE = "Choose another place, or make it yours to write."
KIND = "Choose another place, or move away what is there."
REMEDIES = {
    errno.EACCES: ELSEWHERE,
    errno.EPERM: ELSEWHERE,
    errno.EROFS: ELSEWHERE,
    errno.EEXIST: KIND,
    errno.ENOTDIR: KIND,
    errno.EISDIR: KIND,
    errno.ENAMETOOLONG: "Choose a shorter name.",
    errno.ENOSPC: "Free some disk space and run the same command again: it continues.",
    errno.EDQUOT: "Free some disk space and run the same command again: it continues.",
    errno.EFBIG: "This file system holds no file that large: choose another one.",
    errno.ENOLCK: "This file system has no locks, such as some network drives: choose a folder on a local disk.",
    errno.ELOOP: KIND,
    errno.EIO: "The disk or network drive failed: repair it, or choose another one, and run the same command again.",
    errno.ESTALE: "The network drive is gone: mount it again, and run the same command again.",
}


def _refused(error: OSError) -> FilesError:
    path = "" if error.filename is None else f"{error.filename}: "
    return FilesError(f"{path}{error.strerror}", field="path", fix=REMEDIES[error.errno or 0])


def _misused(error: Any, arguments: list[str], as_json: bool) -> int:
    """A usage error of the parser, such as an unknown option."""
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "osfl"
    if type(error).__name__ == "NoArgsIsHelpError":  # `osfl` alone: the help has been printed
        print(error.format_message())
        return int(error.exit_code)
    reason, fix = _nearest_verb(str(error.format_message()), arguments), f"See `{command} --help`."
    complain(f"Cannot start: {reason}\n{fix}", {"error": "UsageError", "reason": reason, "fix": fix}, as_json)
    return int(error.exit_code)


def _nearest_verb(reason: str, arguments: list[str]) -> str:
    """Our own sentence for a misspelt verb: whether the parser names the nearest ones depends on its version."""
    verb = next((argument for argument in arguments if not argument.startswith("-")), "")
    if not reason.startswith("No such command"):
        return reason
    near = [repr(name) for name in get_close_matches(verb, VERBS)]
    return f"No such command {verb!r}." + (f" Did you mean {' or '.join(near)}?" if near else "")


if __name__ == "__main__":
    main()
