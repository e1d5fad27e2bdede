"""The command `mindtune data check`: what `tasks.data_check` found, as a document and on a terminal."""

import logging
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from schemas.config import LlmConfig
from tasks.data.masks import place_of
from tasks.data.readers import TITLES
from tasks.data_check import DataCheck, ShownRecord, ShownToken, check_data

PROGRESS_LOG = logging.getLogger("mindtune.data")
SHOWN_REJECTS = 20


def check(config: LlmConfig, records: int, index: int | None) -> DataCheck:
    """Read the data of a configuration, progress in the log."""

    def report_progress(done: int, total: int, text: str) -> None:
        PROGRESS_LOG.info(text, extra={"progress": ("data check", done, total, text)})

    return check_data(config, report_progress, records, index)


def as_document(found: DataCheck) -> dict[str, Any]:
    """What was found, for machines; rejected records are counted in full and listed from the first."""
    return {
        "ok": found.is_well,
        "problem": found.problem,
        "proof": {"rows": found.lengths.total(), "fault": found.fault},
        "template": found.template,
        "files": [asdict(file) for file in found.files],
        "rejected": {
            "count": found.reasons.total(),
            "reasons": dict(found.reasons.most_common()),
            "first": [item.model_dump(mode="json") for item in found.rejected],
        },
        "cut": found.cut,
        "split": found.split,
        "tokens": {
            "max_length": found.max_length,
            "total": sum(length * count for length, count in found.lengths.items()),
            "trained": found.trained_tokens,
            "lengths": found.quantiles(),
        },
        "records": [asdict(record) for record in found.shown],
    }


def as_page(found: DataCheck) -> RenderableType:
    """What was found, for a terminal; what is trained on can be told without colours."""
    parts: list[RenderableType] = []
    for record in found.shown:
        parts += [_record(record), ""]
    parts.append(_files(found))
    if found.rejected:
        parts += ["", _rejects(found)]
    parts += ["", _summary(found)]
    return Group(*parts)


def _record(record: ShownRecord) -> RenderableType:
    title = Text(f"{record.place}: ", style="bold").append(record.fate)
    if record.copies > 1:
        title.append(f", seen {record.copies} times in an epoch")
    if record.reason:
        title.append(f": {record.reason}", style="yellow")
    parts: list[RenderableType] = [title]
    for number, row in enumerate(record.rows, start=1):
        trained = sum(token.is_trained for token in row)
        part = f"row {number} of {len(record.rows)}, " if len(record.rows) > 1 else ""
        parts.append(Text(f"  {part}{len(row)} tokens, {trained} trained on (text and id)", style="dim"))
        table = Table.grid(padding=(0, 2, 0, 2))
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")
        for is_trained, tokens in groupby(row, key=lambda token: token.is_trained):
            label = Text("trained", style="green") if is_trained else Text("not trained", style="dim")
            table.add_row(label, Text(" ").join(_token(token) for token in tokens))
        parts.append(table)
    return Group(*parts)


def _token(token: ShownToken) -> Text:
    style = "bold magenta" if token.is_control else "green" if token.is_trained else ""
    return Text(_visible(token.text), style=style).append(f"·{token.id}", style="dim")


def _visible(text: str) -> str:
    """A text on one line in which blanks, line ends and what else can't be seen can be."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode()
        for character in text.replace(" ", "␣")
    )


def _files(found: DataCheck) -> Table:
    table = Table()
    for column in ("file", "container", "format", "weight", "train", "held out", "left out", "rejected"):
        table.add_column(
            column, overflow="fold", justify="left" if column in ("file", "container", "format") else "right"
        )
    for file in found.files:
        counts = (file.train, file.held_out, file.left_out, file.rejected)
        cells = (file.name, TITLES[file.container], file.format, f"{file.weight:g}", *map(str, counts))
        table.add_row(*map(Text, cells))
    return table


def _rejects(found: DataCheck) -> RenderableType:
    lines = [Text(f"{found.reasons.total()} records can't be used:", style="yellow")]
    lines += [Text(f"  {count} {reason}") for reason, count in found.reasons.most_common()]
    lines += [Text(f"    {place_of(item)}: {item.reason}", style="dim") for item in found.rejected[:SHOWN_REJECTS]]
    if found.reasons.total() > SHOWN_REJECTS:
        lines.append(Text("    ...", style="dim"))
    return Group(*lines)


def _summary(found: DataCheck) -> RenderableType:
    rows = found.lengths.total()
    lengths = ", ".join(f"{name} {length}" for name, length in found.quantiles().items())
    total = sum(length * count for length, count in found.lengths.items())
    lines = [Text(f"{rows} rows with template {found.template}: {total} tokens, {found.trained_tokens} trained on")]
    if rows:
        lines.append(Text(f"tokens in a row: {lengths}; tokenize.max_length is {found.max_length}"))
    if found.cut or found.split:
        lines.append(Text(f"{found.cut} records were shortened, {found.split} are in several rows"))
    if found.fault is not None:
        lines.append(Text(f"proof failed: {found.fault}", style="bold red"))
    elif rows:
        lines.append(
            Text(f"proof: {rows} rows train on exactly the answers and one end token each, labels not shifted", "green")
        )
    if found.problem is not None:
        lines.append(Text(f"a run would end here: {found.problem}", style="bold red"))
    return Group(*lines)
