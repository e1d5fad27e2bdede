"""The command line: arguments to a configuration, to a run, to one answer.

Standard output holds the answer (with `--json` exactly one JSON document), standard error the log. Exit codes: 0 done,
1 failed, 2 bad arguments or configuration, 3 environment not fit.
"""

import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import typer
from rich.console import Console

from flows import reference, view
from flows.chat import chat, end_answer, open_conversation, write_piece
from flows.run import as_known_error, pinned_artifacts, run_job, run_stage
from flows.settings import artifact_root, load_config, preset_names, with_data_files
from flows.terminal import log_to_terminal
from schemas.config import DeviceChoice
from schemas.errors import EXIT_FAILED, ConfigError, MindtuneError, StoreError
from schemas.manifest import RunRecord, StageName
from tasks.plan import Planner, check_inputs, explain
from tasks.stages import STAGES
from tasks.store import Store

PIPE_WIDTH = 200  # columns of a table where no terminal says how wide it is

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
artifacts_app = typer.Typer(no_args_is_help=True, help="Look at the artifact store.")
app.add_typer(artifacts_app, name="artifacts")
data_app = typer.Typer(no_args_is_help=True, help="Look at data before anything is trained on it.")
app.add_typer(data_app, name="data")
bench_app = typer.Typer(no_args_is_help=True, help="Measure beside the peers, which `make bench` installs.")
app.add_typer(bench_app, name="bench")


Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Change a setting, e.g. train.epochs=2")
]
RunName = Annotated[str, typer.Option("--run", help="A run's name, or `latest`.")]
_SOURCE_HELP = f"A configuration file, or a preset: {', '.join(preset_names())}."
Source = Annotated[str, typer.Argument(metavar="PRESET|FILE.yaml", help=_SOURCE_HELP)]
Device = Annotated[DeviceChoice | None, typer.Option("--device", help="Shorthand for --set env.device=...")]


@app.callback()
def common(
    artifacts: Annotated[
        Path | None, typer.Option("--artifacts", help="Artifact root, instead of MINDTUNE_ARTIFACTS.")
    ] = None,
) -> None:
    """Fine-tuning on Ascend NPUs with MindSpore, as Prefect flows of typed, cached stages."""
    if artifacts is not None:
        os.environ["MINDTUNE_ARTIFACTS"] = str(artifacts.resolve())


@app.command()
def run(
    source: Source,
    settings: Settings = None,
    device: Device = None,
    accept_code: Annotated[
        bool, typer.Option("--accept-code", help="Reuse what only a change of code would make again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Run a job: reuse every stage that can be, make the rest."""

    def work() -> RunRecord:
        config = load_config(source, _overrides(settings, device))
        return run_job(config, source, Path(source).stem, accept_code)

    _answer_with_run(work, as_json)


@app.command()
def stage(
    name: Annotated[StageName, typer.Argument(metavar="STAGE", help=", ".join(STAGES))],
    run: RunName = "latest",
    settings: Settings = None,
    force: Annotated[bool, typer.Option("--force", help="Make it again although it could be reused.")] = False,
    as_json: Json = False,
) -> None:
    """Run one stage of a run again, from the artifacts that the run has for the stages before it."""
    _answer_with_run(lambda: run_stage(artifact_root(), run, name, settings or [], force), as_json, only=name)


@app.command()
def plan(source: Source, settings: Settings = None, device: Device = None, as_json: Json = False) -> None:
    """Show what would run or be reused, and why; runs nothing."""

    def work() -> tuple[dict[str, Any], Any]:
        config = load_config(source, _overrides(settings, device))
        check_inputs(config)
        root = artifact_root(config)
        decisions = Planner(Store(root), config).plan()
        return view.plan_document(decisions, str(root)), view.plan_table(decisions)

    _answer(work, as_json)


@app.command()
def runs(as_json: Json = False) -> None:
    """List the runs, newest first."""

    def work() -> tuple[dict[str, Any], Any]:
        store = Store(artifact_root())
        records, unreadable = [], []
        for name in reversed(store.run_names()):
            try:
                records.append(store.read_run(name))
            except StoreError as error:
                unreadable.append({"run": name, "problem": error.message})
        return {**view.runs_document(records), "unreadable": unreadable}, view.runs_table(records, unreadable)

    _answer(work, as_json)


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or `latest`.")] = "latest",
    as_json: Json = False,
) -> None:
    """Show one run: its stages, what is stale, its metrics, where its files lie."""

    def work() -> tuple[dict[str, Any], Any]:
        record = Store(artifact_root()).read_run(run)
        return {**view.run_document(record), "config": record.config.model_dump(mode="json")}, record

    _answer(work, as_json)


@app.command()
def generate(
    prompt: Annotated[str | None, typer.Option("--prompt", help="The question; without it a chat.")] = None,
    run: RunName = "latest",
    system: Annotated[str | None, typer.Option(help="A system turn to begin with.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Longest answer, tokens.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Share of the probability that is kept, above 0 to 1.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of the draws.")] = None,
    as_json: Json = False,
) -> None:
    """Answer a question with the MindIR of a run as the answer comes, or chat with it on a terminal.

    Settings that are left out are those of the run's evaluation.
    """

    def work() -> tuple[dict[str, Any], Any]:
        if prompt is None and (as_json or not (sys.stdin.isatty() and sys.stdout.isatty())):
            raise ConfigError("generate.no_prompt")
        record, conversation = open_conversation(
            Store(artifact_root()),
            run,
            system,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
        )
        if prompt is None:
            chat(conversation)
            return {}, None
        reply = conversation.reply(prompt, (lambda piece: None) if as_json else write_piece)
        if not as_json:
            end_answer(reply)
        return {"run": record.run, **vars(reply)}, None

    _answer(work, as_json)


@app.command()
def config(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/configuration.md.")] = False,
    as_json: Json = False,
) -> None:
    """List every setting with its values, default and meaning."""

    def work() -> tuple[dict[str, Any], Any]:
        return reference.as_document(), reference.as_markdown() if markdown else reference.as_table()

    _answer(work, as_json)


@data_app.command("check")
def check_data(
    source: Annotated[str, typer.Option("--preset", metavar="PRESET|FILE.yaml", help=_SOURCE_HELP)],
    files: Annotated[
        list[str] | None,
        typer.Argument(metavar="[FILE]...", help="Data files, folders, globs, URIs; else the preset's."),
    ] = None,
    settings: Settings = None,
    records: Annotated[int, typer.Option(min=0, help="How many records to show, from the first.")] = 3,
    index: Annotated[int | None, typer.Option(min=0, help="The one record to show, by its number from 0.")] = None,
    as_json: Json = False,
) -> None:
    """Show what would be trained on, token by token; rejected records with reasons; exit code 1 when it is unusable."""
    is_well = True

    def work() -> tuple[dict[str, Any], Any]:
        nonlocal is_well
        from flows import data_check

        config = load_config(source, settings or [])
        found = data_check.check(with_data_files(config, files) if files else config, records, index)
        is_well = found.is_well
        return data_check.as_document(found), data_check.as_page(found)

    _answer(work, as_json)
    if not is_well:
        raise typer.Exit(EXIT_FAILED)


@bench_app.command("tokenize")
def bench_tokenize(
    copies: Annotated[list[int] | None, typer.Option(min=1, help="How often the 10,021 records are taken.")] = None,
    as_json: Json = False,
) -> None:
    """Measure the stage `tokenize` beside `datasets`' load_dataset and map, and what packing saves."""

    def work() -> tuple[dict[str, Any], Any]:
        from flows.bench import tokenize

        document = tokenize.run(tuple(copies or tokenize.COPIES))
        return document, view.figures(document)

    _answer(work, as_json)


@bench_app.command("loading")
def bench_loading(as_json: Json = False) -> None:
    """Measure batches from packed shards beside the training that takes them."""

    def work() -> tuple[dict[str, Any], Any]:
        from flows.bench import loading

        document = loading.run()
        return document, view.figures(document)

    _answer(work, as_json)


@artifacts_app.command("list")
def list_artifacts(as_json: Json = False) -> None:
    """List the artifacts of all stages, with their sizes."""

    def work() -> tuple[dict[str, Any], Any]:
        store = Store(artifact_root())
        found, broken = [], []
        for name, folder in store.artifact_folders():
            ref, problem = store.find(name, folder.name)
            if ref is None:
                broken.append({"stage": name, "key": folder.name, "problem": problem})
            else:
                found.append(view.artifact_document(ref, store.read_manifest(folder)))
        return {"artifacts": found, "unusable": broken}, view.artifacts_table(found, broken)

    _answer(work, as_json)


@artifacts_app.command()
def verify(as_json: Json = False) -> None:
    """Check every file of every artifact by its digest; exit code 1 when something is damaged."""
    damaged: list[dict[str, str]] = []

    def work() -> tuple[dict[str, Any], Any]:
        store = Store(artifact_root())
        whole = 0
        for name, folder in store.artifact_folders():
            ref, problem = store.find(name, folder.name, deep=True)
            if ref is None:
                damaged.append({"stage": name, "path": str(folder), "problem": problem})
            else:
                whole += 1
        lines = [f"{item['stage']}: {item['problem']}" for item in damaged]
        return {"whole": whole, "damaged": damaged}, "\n".join([*lines, f"{whole} whole, {len(damaged)} damaged"])

    _answer(work, as_json)
    if damaged:
        raise typer.Exit(EXIT_FAILED)


@artifacts_app.command()
def why(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name, or `latest`.")],
    name: Annotated[StageName, typer.Argument(metavar="STAGE", help=", ".join(STAGES))],
    as_json: Json = False,
) -> None:
    """Show which part of a stage's key differed from the nearest earlier artifact."""

    def work() -> tuple[dict[str, Any], Any]:
        store = Store(artifact_root())
        record = store.read_run(run)
        (ref,) = pinned_artifacts(store, record, [name], "why")
        manifest, nearest, changes = explain(store, ref)
        lines = [f"{manifest.stage} {manifest.key[:12]} was made by {manifest.run}"]
        if nearest is None:
            lines.append("there was no earlier artifact of this stage")
        else:
            lines.append(f"nearest earlier artifact: {nearest.key[:12]}, made by {nearest.run}; what differs:")
            lines += [f"  {change}" for change in changes]
        return view.why_document(manifest, nearest, changes), "\n".join(lines)

    _answer(work, as_json)


def _overrides(settings: list[str] | None, device: DeviceChoice | None) -> list[str]:
    return [*(settings or []), *([f"env.device={device}"] if device else [])]


def _answer_with_run(work: Callable[[], RunRecord], as_json: bool, only: StageName | None = None) -> None:
    def document() -> tuple[dict[str, Any], Any]:
        record = work()
        return view.run_document(record, only), record

    _answer(document, as_json)


def _answer(work: Callable[[], tuple[dict[str, Any], Any]], as_json: bool) -> None:
    """Do the work and print its answer or its error; the one place where exit codes are set."""
    log_to_terminal()
    try:
        document, shown = work()
    except (Exception, KeyboardInterrupt) as error:
        _fail(as_known_error(error), as_json)
    else:
        if as_json:
            sys.stdout.write(json.dumps(document, ensure_ascii=False, allow_nan=False, indent=1) + "\n")
            return
        if shown is None:  # it was printed as it came
            return
        if isinstance(shown, str):
            sys.stdout.write(shown + "\n")  # a model's text may look like markup
            return
        console = Console()
        if not console.is_terminal:
            console.width = PIPE_WIDTH
        if isinstance(shown, RunRecord):
            view.print_run(console, shown)
        else:
            console.print(shown)


def _fail(error: MindtuneError, as_json: bool) -> None:
    logging.getLogger("mindtune").debug("failed", exc_info=error)
    if as_json:
        _print_error(error)
    place = f"{error.stage}: " if error.stage else ""
    Console(stderr=True).print(f"[bold red]error[/] [dim]{error.code}[/]\n", end="")
    sys.stderr.write(f"{place}{error.message}\n{error.hint}\n")
    raise typer.Exit(error.exit_code)


def _print_error(error: MindtuneError) -> None:
    document: dict[str, Any] = {"error": error.as_document()}
    if error.run is not None and error.root is not None:
        with contextlib.suppress(MindtuneError, OSError):  # the error itself is what has to be told
            document = {**view.run_document(Store(Path(error.root)).read_run(error.run)), **document}
    sys.stdout.write(json.dumps(document, ensure_ascii=False, indent=1) + "\n")


@runtime_checkable
class _UsageProblem(Protocol):
    """What typer raises for arguments that it can't take; typer 0.29 exports no common class of them."""

    exit_code: int

    def format_message(self) -> str: ...

    def show(self) -> None: ...


def main() -> None:
    """The console script."""
    # a plain SIGTERM would end this process at once, and training could not save its last steps
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(app(standalone_mode=False))
    except typer.Abort:
        sys.exit(EXIT_FAILED)
    except Exception as error:
        if not isinstance(error, _UsageProblem):
            raise
        if "--json" in sys.argv:
            _print_error(MindtuneError("usage", problem=error.format_message()))
        error.show()
        sys.exit(error.exit_code)
