"""The commands. Each reads its arguments and calls one function; what is imported heavily is imported by that function."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from longrein import __version__
from longrein.config import Config, ConfigError, defaults_text, load, resolved_toml


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 0 done, 1 failed, 2 wrong usage or configuration, 128 + n ended by signal n."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    logging.getLogger("longrein").setLevel(logging.INFO)
    if getattr(options, "parent_pipe", None) is not None:
        from longrein.processes import stop_with_parent

        stop_with_parent(options.parent_pipe)
    try:
        return options.command(options) or 0
    except ConfigError as error:
        return _say(error, 2)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        return _explain(error)


def _explain(error: Exception) -> int:
    """Say a failure that has words for a person; anything else is a defect and keeps its traceback."""
    from longrein.client import ApiError
    from longrein.processes import ChildFailed
    from longrein.run import Interrupted
    from longrein.schema import StoreError
    from longrein.trainer.collect import RunFailed

    if isinstance(error, Interrupted):
        return _say(error, 128 + error.number)
    if isinstance(error, (ApiError, ChildFailed, RunFailed, StoreError)):
        return _say(error, 1)
    raise error


def _say(error: Exception, status: int) -> int:
    print(f"longrein: {error}", file=sys.stderr)
    return status


def gateway(options: argparse.Namespace) -> None:
    from longrein import run

    run.gateway(_load(options))


def controller(options: argparse.Namespace) -> None:
    from longrein import run

    run.controller(_load(options))


def train(options: argparse.Namespace) -> None:
    from longrein import run

    run.train(_load(options), resume=options.resume, overwrite=options.overwrite)


def config(options: argparse.Namespace) -> None:
    print(defaults_text() if options.defaults else resolved_toml(_load(options)), end="")


def report(options: argparse.Namespace) -> None:
    from longrein.report import write_report

    write_report(options.run)


def audit(options: argparse.Namespace) -> int:
    from longrein.audit import command

    return command.command(
        options.run, rules=options.rule, rollouts=options.rollout, form=options.format, least=options.min_severity
    )


def compare(options: argparse.Namespace) -> None:
    from longrein.report import write_comparison

    write_comparison(options.run, options.out)


def serve(options: argparse.Namespace) -> None:
    from longrein import run

    run.serve(options.checkpoint, options.port)


def check(options: argparse.Namespace) -> int:
    from longrein.gateway import check

    return check.command(options.model, chat_template=options.template, parser=options.parser, as_json=options.json)


def export(options: argparse.Namespace) -> None:
    from longrein import export

    export.command(
        options.run,
        options.output,
        file_format=options.format,
        split=options.split,
        min_reward=options.min_reward,
        kinds=options.kinds,
    )


def store_check(options: argparse.Namespace) -> int:
    from longrein import storecheck

    return storecheck.command(options.run)


def store_prune(options: argparse.Namespace) -> None:
    from longrein import run

    run.prune_store(options.run, options.keep, vacuum=options.vacuum)


def _load(options: argparse.Namespace) -> Config:
    return load(options.file, options.set)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="longrein", description="Trains language-model agents in the harness they ship with."
    )
    parser.add_argument("--version", action="version", version=f"longrein {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: object, text: str, file: str | None) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=text, description=text)
        one.set_defaults(command=command)
        if file is not None:
            one.add_argument("file", metavar="FILE", nargs=None if file == "needed" else "?", help="run file (TOML)")
            one.add_argument(
                "--set",
                metavar="SECTION.KEY=VALUE",
                action="append",
                default=[],
                help="set one option, over the run file; can be given again",
            )
        return one

    one = add("train", train, "train as a run file says; starts gateway and controller with it", "needed")
    one.add_argument("--resume", action="store_true", help="go on with a run that was started before")
    one.add_argument("--overwrite", action="store_true", help="remove what a run of this name left, and start anew")
    one = add("gateway", gateway, "run a gateway alone, in the foreground", "optional")
    one.add_argument("--parent-pipe", type=int, help=argparse.SUPPRESS)
    one = add("controller", controller, "run a controller alone, in the foreground", "optional")
    one.add_argument("--parent-pipe", type=int, help=argparse.SUPPRESS)
    one = add("config", config, "print the run file as it is resolved", "optional")
    one.add_argument("--defaults", action="store_true", help="print every option with its default and its meaning")
    one = add("report", report, "say what a run did: rewards, tokens, forks, times, failures", None)
    one.add_argument("run", metavar="RUN", help="the run's folder")
    one = add("audit", audit, "say what agents tried that they should not, with excerpts; status 1 if anything", None)
    one.add_argument("run", metavar="RUN", help="the run's folder; the run may be going on")
    one.add_argument("--rule", metavar="ID", action="append", default=[], help="only this rule; can be given again")
    one.add_argument(
        "--rollout", metavar="ID", action="append", default=[], help="only this rollout; can be given again"
    )
    one.add_argument("--format", choices=("table", "jsonl"), default="table", help="(%(default)s)")
    one.add_argument(
        "--min-severity", choices=("low", "medium", "high"), default="low", help="leave out what is below (%(default)s)"
    )
    one = add("compare", compare, "several runs in one table and picture", None)
    one.add_argument("run", metavar="RUN", nargs="+", help="folders of runs")
    one.add_argument("--out", metavar="PNG", default="compare.png", help="where the picture goes (%(default)s)")
    one = add(
        "check", check, "say whether a model can be trained exactly, and what its template does to a history", None
    )
    one.add_argument("model", metavar="MODEL", help="model folder, or a hub name (owner/name)")
    one.add_argument("--template", metavar="FILE", default="", help="chat template (Jinja) in place of the model's own")
    one.add_argument("--parser", metavar="NAME", default="auto", help="as model.parser (%(default)s)")
    one.add_argument("--json", action="store_true", help="print the findings as JSON")
    one = add("export", export, "write a run's trajectories to a file that other trainers read", None)
    one.add_argument("run", metavar="RUN|URL", help="the run's folder, or the URL of its record")
    one.add_argument("--output", metavar="FILE", required=True, help="where they go; replaced when all are written")
    one.add_argument("--format", choices=("parquet", "jsonl"), required=True)
    one.add_argument(
        "--split", choices=("train", "val", "all"), default="all", help="rollouts of which mode (%(default)s)"
    )
    one.add_argument("--min-reward", metavar="REWARD", type=float, help="leave out rollouts with less, or with none")
    one.add_argument(
        "--kinds",
        metavar="KIND",
        nargs="+",
        choices=("main", "sub-agent", "compaction", "title"),
        help="kinds of calls whose tokens are in the loss (those that the run trains)",
    )
    stores = commands.add_parser("store", help="look after a run's record", description="look after a run's record")
    store_commands = stores.add_subparsers(required=True, metavar="COMMAND")
    text = "look at every page and row of a record; exit status 1 when something is wrong"
    one = store_commands.add_parser("check", help=text, description=text)
    one.add_argument("run", metavar="RUN|URL", help="the run's folder, or the URL of its record")
    one.set_defaults(command=store_check)
    text = "remove tokens and messages of rollouts that were learned from; no gateway may have the record open"
    one = store_commands.add_parser("prune", help=text, description=text)
    one.add_argument("run", metavar="RUN", help="the run's folder")
    one.add_argument("--keep", metavar="rewards|N", help="as store.keep in the run file, which it stands in for")
    one.add_argument("--vacuum", action="store_true", help="write the database anew without its free space")
    one.set_defaults(command=store_prune)
    one = add("serve", serve, "serve a checkpoint as an OpenAI-compatible endpoint", None)
    one.add_argument("checkpoint", metavar="CHECKPOINT", help="model folder, such as RUN/checkpoints/step-000100")
    one.add_argument("--port", type=int, default=0, help="port to listen on; 0 takes a free one")
    return parser


if __name__ == "__main__":
    sys.exit(main())
