"""How runs, plans and artifacts are shown: JSON documents for machines, tables for people."""

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from schemas.manifest import ArtifactRef, Manifest, RunRecord, StageName, StageOutcome
from tasks.plan import Change, Decision
from tasks.stages import STAGES

_COLORS = {"ran": "green", "reused": "cyan", "failed": "red", "not_run": "dim", "reuse": "cyan", "run": "green"}


def run_document(record: RunRecord, only: StageName | None = None) -> dict[str, Any]:
    """A run as `--json` prints it.

    Args:
        record: the run.
        only: the one stage to list.
    """
    stale = record.stale_stages()
    document: dict[str, Any] = {
        "run": record.run,
        "status": record.status,
        "stages": [
            _outcome_document(outcome, stale.get(outcome.stage))
            for outcome in record.stages
            if only is None or outcome.stage == only
        ],
    }
    if stale:
        document["stale"] = list(stale)
    if record.error:
        document["error"] = record.error
    return document


def _outcome_document(outcome: StageOutcome, stale: str | None) -> dict[str, Any]:
    document = outcome.model_dump(
        mode="json", include={"stage", "key", "digest", "action", "reason", "seconds", "path", "metrics"}
    )
    return {**document, "stale": stale} if stale else document


def run_table(record: RunRecord) -> Table:
    """A run for people: what each stage did, why, and what is stale."""
    stale = record.stale_stages()
    table = Table(title=f"run {record.run}: {record.status}", title_justify="left")
    for column in ("stage", "", "artifact", "seconds", "why"):
        table.add_column(column, justify="right" if column == "seconds" else "left")
    for outcome in record.stages:
        action = f"[{_COLORS[outcome.action]}]{outcome.action}[/]"
        if outcome.stage in stale:
            action += f" [yellow]stale ({stale[outcome.stage]})[/]"
        seconds = f"{outcome.seconds:.1f}" if outcome.action == "ran" else ""
        table.add_row(outcome.stage, action, (outcome.key or "")[:12], seconds, escape(outcome.reason))
    return table


def metrics_table(record: RunRecord) -> Table:
    """The numbers that the stages of a run reported."""
    table = Table(show_header=False, box=None)
    for outcome in record.stages:
        for name, value in outcome.metrics.items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            table.add_row(f"[dim]{outcome.stage}[/]", name, escape(shown))
    return table


def plan_document(decisions: Sequence[Decision], root: str) -> dict[str, Any]:
    """A plan as `--json` prints it."""
    return {
        "artifacts": root,
        "stages": [
            {
                "stage": decision.stage,
                "action": "reuse" if decision.ref else "run",
                "reason": decision.reason,
                "key": decision.key,
                "code_only": decision.code_only,
            }
            for decision in decisions
        ],
    }


def plan_table(decisions: Sequence[Decision]) -> Table:
    """A plan for people."""
    table = Table(title="plan", title_justify="left")
    for column in ("stage", "", "why", "what it does"):
        table.add_column(column)
    for decision in decisions:
        action = "reuse" if decision.ref else "run"
        reason = escape(decision.reason) + (" (only code: --accept-code reuses)" if decision.code_only else "")
        table.add_row(decision.stage, f"[{_COLORS[action]}]{action}[/]", reason, STAGES[decision.stage].title)
    return table


def runs_document(records: Sequence[RunRecord]) -> dict[str, Any]:
    """All runs as `--json` prints them, newest first."""
    return {
        "runs": [
            {
                "run": record.run,
                "status": record.status,
                "source": record.source,
                "created": record.created.isoformat(),
                "stale": list(record.stale_stages()),
            }
            for record in records
        ]
    }


def runs_table(records: Sequence[RunRecord], unreadable: Sequence[dict[str, str]]) -> Table:
    """All runs for people, newest first, and those whose record can't be read."""
    table = Table("run", "status", "from", "ran", "reused", "stale")
    for record in records:
        count = {action: sum(one.action == action for one in record.stages) for action in ("ran", "reused")}
        stale = ", ".join(record.stale_stages())
        table.add_row(record.run, record.status, escape(record.source), str(count["ran"]), str(count["reused"]), stale)
    for item in unreadable:
        table.add_row(item["run"], "[red]unreadable[/]", escape(item["problem"]), "", "", "")
    return table


def artifact_document(ref: ArtifactRef, manifest: Manifest) -> dict[str, Any]:
    """One artifact as `--json` lists it."""
    return {
        "stage": ref.stage,
        "key": ref.key,
        "digest": ref.digest,
        "size_bytes": sum(entry.size_bytes for entry in manifest.files),
        "created": manifest.created.isoformat(),
        "run": manifest.run,
        "location": ref.location,
    }


def why_document(manifest: Manifest, nearest: Manifest | None, changes: Sequence[Change]) -> dict[str, Any]:
    """Why an artifact was made, as `--json` prints it."""
    return {
        "stage": manifest.stage,
        "key": manifest.key,
        "made_by": manifest.run,
        "nearest": None if nearest is None else {"key": nearest.key, "made_by": nearest.run},
        "differences": [
            {"path": ".".join(change.path), "old": change.old, "new": change.new, "text": str(change)}
            for change in changes
        ],
    }


def artifacts_table(found: Sequence[dict[str, Any]], unusable: Sequence[dict[str, Any]]) -> Table:
    """All artifacts for people."""
    table = Table("stage", "key", "size", "made by")
    for item in found:
        table.add_row(item["stage"], item["key"][:12], f"{item['size_bytes'] / 1e6:.1f} MB", item["run"])
    for item in unusable:
        table.add_row(item["stage"], item["key"][:12], "[red]unusable[/]", escape(item["problem"]))
    return table


def print_run(console: Console, record: RunRecord) -> None:
    """A run for people, with its metrics and where to look."""
    console.print(run_table(record))
    console.print(metrics_table(record))
    evaluation = record.outcome("evaluate")
    if evaluation is not None and evaluation.path is not None:
        console.print(f"report: {evaluation.path}/report.html", soft_wrap=True, highlight=False)


def figures(document: Any, indent: str = "") -> str:
    """Nested figures for people, one a line."""
    pairs = document.items() if isinstance(document, dict) else enumerate(document)
    return "\n".join(
        f"{indent}{name}:\n{figures(below, indent + '  ')}"
        if isinstance(below, (dict, list))
        else f"{indent}{name}: {below}"
        for name, below in pairs
    )
