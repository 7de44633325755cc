"""What does `pp-protocol` say on the command line?"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from . import __version__
from .targets import REFERENCE

EXIT_STATUS = """\
exit status:
  0  everything that was checked conforms
  1  something does not conform
  2  something could not be checked: a target that cannot be imported or made, an observer that
     gives no output, no target at all

A TARGET is module:attribute, where the attribute is an observer, a class that makes one without
arguments, or a factory. Modules in the working directory are found.

examples:
  pp-protocol check my_plugin:EntropyObserver
  pp-protocol check my_plugin.factories:make_observer --stages 4
  pp-protocol check my_plugin:Observer --inputs my_tests:inputs
  pp-protocol check my_plugin:Observer --tp 2
  pp-protocol check --reference

--inputs names a callable (step, batch_size) -> dict, called on the first and the last stage with
the same arguments. It returns any of
  logits         float tensor [batch_size, vocabulary], what before_grammar is given
  sampling_info  what is_active and before_grammar are given
  batch          what consume is given; has .reqs, a list of batch_size requests
and what it does not return is the pipeline's own.

The static part asks mypy, with your own configuration, whether the observer satisfies
PPCapableObserver against the stubs that ship with pp-protocol; install pp-protocol[mypy] for it.

--format json prints one object: {"version": 1, "status": exit status, "targets": [{"target",
"verdict", "parts": [{"name", "verdict", "summary", "seconds", "findings": [...], "warnings":
[...]}]}]}, each finding {"code", "found", "advice", "file", "line"}, with "" and 0 where the place
is not known. --format github prints workflow annotations on the file and line of your code.

Without TARGET and --reference the targets are those of pyproject.toml in the working directory:
  [tool.pp-protocol]
  targets = ["my_plugin:EntropyObserver"]
"""


class NothingToCheck(Exception):  # noqa: N818  # says what happened
    """No target, or none that could be read."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; gives the exit status."""
    arguments = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminated)
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch, without numpy
    try:
        run: Callable[[argparse.Namespace], int] = arguments.run
        return run(arguments)
    except NothingToCheck as error:
        print(f"pp-protocol: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has had enough of it
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # until the interpreter ends
        return 2
    except Exception:  # a fault of this program must not look like one of the observer
        traceback.print_exc()
        return 2
    except KeyboardInterrupt:
        print("pp-protocol: interrupted; no process is left", file=sys.stderr)
        return 130


def _terminated(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)  # by way of the clean-up that ends the stages


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pp-protocol",
        description="Check sampling observers for pipeline parallelism before a GPU is booked.",
    )
    parser.add_argument("--version", action="version", version=f"pp-protocol {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    check = commands.add_parser(
        "check",
        help="check observers on a real pipeline of processes",
        description=(
            "For each target: whether its members can be called as the engine calls them, and"
            " whether what it sends on the last stage arrives on the first, bit for bit, on a real"
            " pipeline of processes over gloo on this machine."
        ),
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    check.set_defaults(run=_check)
    check.add_argument("targets", nargs="*", metavar="TARGET", help="module:attribute")
    check.add_argument(
        "--reference", action="store_true", help="check the package's own reference observer"
    )
    check.add_argument(
        "--stages", type=_at_least(2), default=2, metavar="N", help="pipeline stages (2)"
    )
    check.add_argument(
        "--tp",
        type=_at_least(1),
        default=1,
        metavar="N",
        help="tensor-parallel ranks of each stage; every output has to be the same on all (1)",
    )
    check.add_argument(
        "--steps", type=_at_least(1), default=12, metavar="N", help="batches to sample (12)"
    )
    check.add_argument(
        "--seed",
        type=_at_least(0, 2**32 - 1),
        default=0,
        metavar="N",
        help="of weights, requests and sampler (0)",
    )
    check.add_argument(
        "--inputs", metavar="MODULE:CALLABLE", help="supply the engine's objects; see below"
    )
    check.add_argument(
        "--timeout",
        type=_at_least(1),
        default=60,
        metavar="SECONDS",
        help="without a sign of life from any stage (60)",
    )
    check.add_argument(
        "--require",
        action="append",
        choices=["static"],
        default=[],
        metavar="PART",
        help="fail if this part (static) cannot run, or leaves something unchecked",
    )
    check.add_argument(
        "--format",
        choices=["text", "json", "github"],
        default="text",
        help="of the result; json and github leave the progress to standard error (text)",
    )
    explain = commands.add_parser(
        "explain",
        help="say what a code means, and what to do about it",
        description=(
            "For a code, as errors and checks print it: when it happens, usual causes, how to fix"
            " it, how to prevent it, how to check before. Without one: the list of all codes."
        ),
    )
    explain.set_defaults(run=_explain)
    explain.add_argument("code", nargs="?", metavar="CODE", help="unsupported-observer, for one")
    return parser


def _at_least(least: int, most: int = 10**9) -> Any:
    def number(text: str) -> int:
        if not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text} is not between {least} and {most}")
        return int(text)

    number.__name__ = "number"
    return number


def _check(arguments: argparse.Namespace) -> int:
    targets = list(arguments.targets)
    if arguments.reference:
        targets.append(REFERENCE)
    if not targets:
        try:
            targets = _configured_targets()
        except NothingToCheck:
            if arguments.format == "json":  # whoever reads it expects one object
                _tell('{"version": 1, "status": 2, "targets": []}')
            raise
    from .check import CANNOT, FAILS, Options, check_target
    from .formats import FORMATS

    options = Options(
        arguments.stages,
        arguments.steps,
        arguments.seed,
        float(arguments.timeout),
        arguments.inputs,
        arguments.tp,
        tuple(arguments.require),
    )
    text = arguments.format == "text"
    with contextlib.nullcontext() if text else _standard_output_aside():
        results = {}
        for target in dict.fromkeys(targets):
            _tell(target)
            results[target] = check_target(target, options, _tell)
        _tell("")
    verdicts = {part.verdict for parts in results.values() for part in parts}
    status = 1 if FAILS in verdicts else 2 if CANNOT in verdicts else 0
    _tell(FORMATS[arguments.format](results, status))
    return status


@contextlib.contextmanager
def _standard_output_aside() -> Iterator[None]:
    """Send what is printed, by the observers and their stages too, to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def _explain(arguments: argparse.Namespace) -> int:
    from .catalogue import CATALOGUE, explained, listed

    if arguments.code is None:
        _tell(listed())
        return 0
    if arguments.code not in CATALOGUE:
        near = difflib.get_close_matches(arguments.code, CATALOGUE, 3, 0.5)
        meant = f"; did you mean {' or '.join(near)}?" if near else ""
        print(f"pp-protocol: no code is {arguments.code!r}{meant}", file=sys.stderr)
        return 2
    _tell(explained(arguments.code))
    return 0


def _tell(line: str) -> None:
    print(line, flush=True)


def _configured_targets() -> list[str]:
    path = os.path.join(os.getcwd(), "pyproject.toml")
    nothing = "nothing of yours was checked: name a TARGET (module:attribute) or --reference"
    if not os.path.exists(path):
        raise NothingToCheck(nothing)
    if sys.version_info >= (3, 11):
        import tomllib
    else:  # it came with 3.11; tomli is the same under another name
        try:
            import tomli as tomllib
        except ModuleNotFoundError:
            raise NothingToCheck(f"{nothing} (reading {path} needs Python 3.11 or tomli)") from None
    try:
        with open(path, "rb") as file:
            tools = tomllib.load(file).get("tool", {})
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise NothingToCheck(f"{nothing} ({path}: {error})") from None
    tools = tools if isinstance(tools, dict) else {}
    if "pp_protocol" in tools:
        raise NothingToCheck(f"{nothing} ({path}: the table is [tool.pp-protocol], with a hyphen)")
    table = tools.get("pp-protocol", {})
    if not isinstance(table, dict):
        raise NothingToCheck(f"{nothing} ({path}: tool.pp-protocol is no table)")
    for key in table:
        if key != "targets":
            raise NothingToCheck(f"{nothing} ({path}: [tool.pp-protocol] takes targets, not {key})")
    targets = table.get("targets", [])
    if not (isinstance(targets, list) and all(isinstance(target, str) for target in targets)):
        raise NothingToCheck(f"{nothing} ({path}: targets is a list of strings)")
    if not targets:
        raise NothingToCheck(f"{nothing}, or list targets under [tool.pp-protocol] in {path}")
    return targets
