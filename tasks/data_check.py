"""What a configuration would be trained on, found without running a stage: records token by token, rejects, lengths.

Everything goes through the code of the stage `tokenize`, so what is shown is what it would write; nothing is written.
"""

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from schemas.config import LlmConfig
from schemas.errors import StageError
from schemas.reports import Rejected
from schemas.tables import IGNORE_LABEL
from tasks.data.decoding import TextStream
from tasks.data.encoding import Encoder
from tasks.data.first_look import sniff
from tasks.data.formats import FormatName
from tasks.data.making import LeftOut, Made, Maker, read_batches
from tasks.data.masks import TokenRow, place_of
from tasks.data.replacing import Replacer
from tasks.data.sources import Container, training_files, validation_files
from tasks.tokenize import open_encoder

LISTED_REJECTS = 100
QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True)
class ShownToken:
    """One token of a row.

    Args:
        id: its id.
        text: what it writes after those before it; empty within a character that a later token completes.
        is_trained: it has a label.
        is_control: it is no text: the start, the end of an answer, a marker of the template.
    """

    id: int
    text: str
    is_trained: bool
    is_control: bool


@dataclass(frozen=True)
class ShownRecord:
    """What becomes of one record.

    Args:
        place: where it stands.
        fate: `train`, `held out`, `left out` by a weight, or `rejected`.
        copies: how often its rows stand among the training rows; 1 in the held-out ones.
        reason: why it is rejected.
        rows: its tokens.
    """

    place: str
    fate: Literal["train", "held out", "left out", "rejected"]
    copies: int = 0
    reason: str | None = None
    rows: tuple[tuple[ShownToken, ...], ...] = ()


@dataclass
class CheckedFile:
    """What was found in one data file."""

    name: str
    container: Container
    format: FormatName
    weight: float
    train: int = 0
    held_out: int = 0
    left_out: int = 0
    rejected: int = 0


@dataclass
class DataCheck:
    """What was found.

    Args:
        template: the template that was used.
        max_length: longest row, tokens.
        files: by file, training files first.
        shown: the records asked for.
        reasons: rejected records by reason.
        rejected: the first of them.
        cut: kept records whose questions were shortened.
        split: kept records in several rows.
        lengths: rows by their length in tokens.
        trained_tokens: of all rows.
        fault: why a row would be trained wrongly; the rest was not looked at.
        problem: why a run would end at this data.
    """

    template: str
    max_length: int
    files: list[CheckedFile]
    shown: list[ShownRecord] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    rejected: list[Rejected] = field(default_factory=list)
    cut: int = 0
    split: int = 0
    lengths: Counter[int] = field(default_factory=Counter)
    trained_tokens: int = 0
    fault: str | None = None
    problem: str | None = None

    @property
    def is_well(self) -> bool:
        """Whether a run would train on this data, and rightly."""
        return self.fault is None and self.problem is None

    def quantiles(self) -> dict[str, int]:
        """Row lengths in tokens: the shortest, some quantiles, the longest; empty without rows."""
        if not self.lengths:
            return {}
        lengths = np.array(sorted(self.lengths))
        reached = np.cumsum([self.lengths[int(length)] for length in lengths]) / self.lengths.total()
        middle = {f"{share:.0%}": int(lengths[np.searchsorted(reached, share)]) for share in QUANTILES}
        return {"shortest": int(lengths[0]), **middle, "longest": int(lengths[-1])}


def check_data(
    config: LlmConfig,
    report_progress: Callable[[int, int, str], None],
    records: int = 3,
    index: int | None = None,
) -> DataCheck:
    """Read the data of a configuration as `tokenize` would.

    Args:
        config: data, template, tokenizer.
        report_progress: called with done, total and a short text.
        records: how many records to show, from the first.
        index: the one record to show instead, by its number from 0; of every file.

    Raises:
        InputError: what `tokenize` refuses before it has read the records: files, tokenizer, chat template, settings.
    """
    data = config.data
    files = [
        CheckedFile(file.name, *sniff(file), file.weight) for file in (*training_files(data), *validation_files(data))
    ]
    encoder = open_encoder(config)
    maker = Maker(config, encoder)
    check = DataCheck(config.tokenize.template, config.tokenize.max_length, files)
    read, total = 0, 0
    try:
        for batch in read_batches(data, Replacer(data.replace)):
            for item in maker.each(batch)[0]:
                _count(check, check.files[batch.source], item)
                number = item.record if isinstance(item, Rejected) else item.record.index
                if (len(check.shown) < records) if index is None else number == index:
                    check.shown.append(_shown(item, encoder))
            read += len(batch.items)
            total = batch.bytes_total
            report_progress(batch.bytes_done, total, f"{read} records")
        report_progress(total, total, f"{read} records")
    except StageError as error:
        check.fault = error.message
    check.problem = _problem(check, config)
    return check


def _count(check: DataCheck, file: CheckedFile, item: Made | LeftOut | Rejected) -> None:
    if isinstance(item, Rejected):
        file.rejected += 1
        check.reasons[item.reason.partition(" (")[0]] += 1
        if len(check.rejected) < LISTED_REJECTS:
            check.rejected.append(item)
        return
    if isinstance(item, LeftOut):
        file.left_out += 1
        return
    if item.is_held_out:
        file.held_out += 1
    else:
        file.train += 1
    check.cut += item.made.is_cut
    check.split += item.made.is_split
    for row in item.made.rows:
        lengths = list(map(len, row.parts))
        check.lengths[sum(lengths)] += item.copies
        check.trained_tokens += item.copies * sum(itertools.compress(lengths, row.is_trained))


def _problem(check: DataCheck, config: LlmConfig) -> str | None:
    """Why `tokenize` would end, in the order in which it would."""
    rejected = check.reasons.total()
    read = rejected + sum(file.train + file.held_out + file.left_out for file in check.files)
    if check.fault is not None:
        return None
    if rejected and config.data.on_bad == "stop":
        return f"data.on_bad is stop, and {place_of(check.rejected[0])} can't be used: {check.rejected[0].reason}"
    if not any(file.train for file in check.files):
        return "no record is left to train on"
    if config.data.validation and not any(file.held_out for file in check.files):
        return "no record of data.validation can be used"
    if rejected > config.data.max_rejected_share * read:
        return f"{rejected} of {read} records can't be used, more than data.max_rejected_share allows"
    return None


def _shown(item: Made | LeftOut | Rejected, encoder: Encoder) -> ShownRecord:
    if isinstance(item, Rejected):
        return ShownRecord(place_of(item), "rejected", reason=item.reason)
    if isinstance(item, LeftOut):
        return ShownRecord(place_of(item.record), "left out")
    rows = tuple(_tokens(row, encoder) for row in item.made.rows)
    return ShownRecord(place_of(item.record), "held out" if item.is_held_out else "train", item.copies, None, rows)


def _tokens(row: TokenRow, encoder: Encoder) -> tuple[ShownToken, ...]:
    """The tokens of a row; contexts and answers are texts of their own, as they were encoded."""
    tokens: list[ShownToken] = []
    stream = TextStream(encoder.decode)
    was_trained = False
    for i, label in zip(row.input_ids, row.labels, strict=True):
        is_trained = label != IGNORE_LABEL
        name = encoder.control_name(i)
        if name is not None or is_trained != was_trained:
            stream = TextStream(encoder.decode)
        was_trained = is_trained
        tokens.append(ShownToken(i, stream.push(i) if name is None else name, is_trained, name is not None))
    return tuple(tokens)
