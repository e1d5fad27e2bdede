import hashlib
import itertools
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from schemas.config import LlmConfig
from schemas.errors import InputError, StageError
from tasks import tokenize
from tasks.data import making, masks
from tasks.data.encoding import Encoder
from tasks.data.making import is_held_out
from tasks.data.masks import segments_of
from tasks.data.proof import find_faults, split_packed
from tasks.data.records import Record, Turn, exchange
from tasks.data.shards import TokenRows
from tasks.tokenize import open_encoder


def record(number: int) -> dict[str, str]:
    return {"instruction": f"What is {number}?", "input": "", "output": f"It is {number}."}


def write_array(path: Path, records: list[Any]) -> Path:
    path.write_text(json.dumps(records), encoding="utf-8")
    return path


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "hundred.jsonl", [record(number) for number in range(100)])


def answers(encoder: Encoder, rows: list[tuple[list[int], list[int]]]) -> list[str]:
    return [encoder.decode(label for label in labels if label != -100) for _, labels in rows]


def test_rows_keep_the_order_of_files_and_records(tokenize_files: Any, stories: Path, tmp_path: Path) -> None:
    files = [
        write_array(tmp_path / "b.json", [record(1), record(2)]),
        write_lines(tmp_path / "a.jsonl", [record(3), record(4)]),
    ]
    made = tokenize_files(*files, validation=[str(write_lines(tmp_path / "v.jsonl", [record(5)]))])
    encoder = Encoder(stories)
    assert answers(encoder, made.train) == ["It is 1.", "It is 2.", "It is 3.", "It is 4."]
    assert answers(encoder, made.validation) == ["It is 5."]
    assert not made.report.validation_is_training


def test_the_same_input_gives_the_same_bytes(tokenize_files: Any, hundred: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    copy = elsewhere / "other.name"
    copy.write_bytes(hundred.read_bytes())
    one, two = (tokenize_files(file, validation_share=0.2, rows_per_shard=30) for file in (hundred, copy))

    def content(folder: Path) -> dict[str, bytes]:
        files = (path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    assert content(one.folder) == content(two.folder)
    assert {"train/part-00002.arrow", "validation/part-00000.arrow", "report.json"} <= set(content(one.folder))


def test_only_the_list_of_rejects_names_files_and_is_no_part_of_the_digest(tokenize_files: Any, tmp_path: Path) -> None:
    made = tokenize_files(write_lines(tmp_path / "data.jsonl", [record(1), {}, record(2)]))
    assert made.result.volatile == ("rejected.jsonl",)
    assert "data.jsonl" not in (made.folder / "report.json").read_text(encoding="utf-8")
    (line,) = (made.folder / "rejected.jsonl").read_text(encoding="utf-8").splitlines()
    assert json.loads(line) == {"source": "data.jsonl", "record": 1, "line": 2, "reason": "output is missing"}


def test_the_metrics_count_rows_and_tokens(tokenize_files: Any, stories: Path, hundred: Path) -> None:
    metrics = tokenize_files(hundred, validation_share=0.2).result.metrics
    lengths, trained = [], 0
    encoder = Encoder(stories)
    for number in range(100):
        answer = encoder.answer_ids(f"It is {number}.")
        lengths.append(len(encoder.encode_prompt(f"Q: What is {number}?\nA:")) + len(answer) + 1)
        trained += len(answer) + 1
    assert metrics["rows"] + metrics["validation_rows"] == 100
    assert 0 < metrics["validation_rows"] < 50
    assert (metrics["tokens"], metrics["trained_tokens"], metrics["rejected"]) == (sum(lengths), trained, 0)


def test_the_report_adds_up_and_counts_lengths(tokenize_files: Any, hundred: Path) -> None:
    made = tokenize_files(hundred, validation_share=0.3)
    report = made.report
    assert report.read == report.kept == report.train.rows + report.validation.rows == 100
    for split, rows in ((report.train, made.train), (report.validation, made.validation)):
        lengths = [len(ids) for ids, _ in rows]
        assert (split.rows, split.tokens, split.longest) == (len(lengths), sum(lengths), max(lengths))
        assert split.trained_tokens == sum(label != -100 for _, labels in rows for label in labels)
        edges = split.histogram_edges
        assert list(split.histogram_counts) == [
            sum(low <= length < high for length in lengths) for low, high in itertools.pairwise(edges)
        ]
        assert sum(split.histogram_counts) == split.rows
    assert (report.bos_id, report.eos_id) == (1, 2)


def test_packing_puts_whole_records_together_and_loses_none(tokenize_files: Any, hundred: Path) -> None:
    plain = tokenize_files(hundred, validation_share=0.3, max_length=100)
    packed = tokenize_files(hundred, validation_share=0.3, max_length=100, packing="pack")
    for name, single in (("train", plain.train), ("validation", plain.validation)):
        split = TokenRows(packed.folder / name, by_segment=True)
        found = sorted(split.row(index).input_ids.tolist() for index in range(len(split)))
        assert found == sorted(ids for ids, _ in single)
    report = packed.report
    assert report.validation.rows < report.validation.records == plain.report.validation.rows
    assert report.train.records == plain.report.train.rows == report.kept - report.validation.records
    assert report.train.rows == len(packed.train) < report.train.records / 2
    assert report.train.longest == plain.report.train.longest
    assert (report.packing, report.padded_lengths) == ("pack", (100,))
    assert report.real_token_share == report.train.tokens / (report.train.rows * 100)


def test_buckets_leave_the_rows_as_they_are_and_pad_them_less(tokenize_files: Any, tmp_path: Path) -> None:
    records = [{"instruction": "Say it.", "output": "ha " * number} for number in range(1, 91, 3)]
    file = write_array(tmp_path / "records.json", records)
    plain = tokenize_files(file)
    buckets = tokenize_files(file, packing="buckets", buckets=3)
    assert buckets.train == plain.train
    lengths = buckets.report.padded_lengths
    assert len(lengths) == 3
    assert lengths[-1:] == plain.report.padded_lengths
    padded = sum(next(length for length in lengths if length >= len(ids)) for ids, _ in buckets.train)
    assert buckets.report.real_token_share == buckets.report.train.tokens / padded
    assert buckets.report.real_token_share > plain.report.real_token_share


def test_what_is_held_out_depends_on_the_record_alone(tokenize_files: Any, stories: Path, tmp_path: Path) -> None:
    records = [record(number) for number in range(60)]
    shuffled = records[::2]
    random.Random(1).shuffle(shuffled)
    encoder = Encoder(stories)
    whole = tokenize_files(write_array(tmp_path / "whole.json", records), validation_share=0.3)
    half = tokenize_files(write_lines(tmp_path / "half.jsonl", shuffled * 2), validation_share=0.3)
    held_out = set(answers(encoder, whole.validation))
    assert 5 < len(held_out) < 30
    assert set(answers(encoder, half.validation)) == held_out & {record["output"] for record in shuffled}
    # each record stands twice, and both are on one side
    assert set(answers(encoder, half.validation)).isdisjoint(answers(encoder, half.train))


def test_a_larger_share_holds_out_more_of_the_same_records() -> None:
    records = [Record("f", i, None, exchange(f"What is {i}?", "It.")) for i in range(2000)]
    held_out = {share: {r.index for r in records if is_held_out(r, share)} for share in (0, 0.05, 0.1, 0.5)}
    assert held_out[0] == set()
    assert held_out[0.05] < held_out[0.1] < held_out[0.5]
    assert len(held_out[0.1]) == pytest.approx(200, abs=60)  # binomial, standard deviation 13
    # independent of this code: SHA-256 over the three texts as JSON
    first = hashlib.sha256(b'["What is 0?","","It."]').hexdigest()
    assert is_held_out(records[0], (int(first[:16], 16) + 1024) / 2**64)
    assert not is_held_out(records[0], (int(first[:16], 16) - 1024) / 2**64)


def test_all_texts_decide_what_is_held_out() -> None:
    texts = [("a", "b", "c"), ("ab", "", "c"), ("a", "bc", "c"), ("b", "a", "c"), ("a", "b", "d")]
    conversations = [exchange(a, c, b) for a, b, c in texts] + [
        exchange("a", "c", "b", system="s"),
        (*exchange("a", "b"), *exchange("a", "b")),
        (Turn("assistant", "a"),),
    ]
    sides = [[is_held_out(Record("f", 0, None, turns), share / 64) for share in range(64)] for turns in conversations]
    assert len({tuple(side) for side in sides}) == len(conversations)


def test_without_held_out_rows_the_training_rows_stand_in(tokenize_files: Any, hundred: Path) -> None:
    made = tokenize_files(hundred, validation_share=0)
    assert made.report.validation_is_training
    assert made.validation == []
    assert list((made.folder / "validation").iterdir()) == []
    assert (made.report.validation.rows, made.report.validation.histogram_counts) == (0, (0,))


def test_a_longer_record_is_left_out_whole_and_named_with_its_length(tokenize_files: Any, tmp_path: Path) -> None:
    long = {"instruction": "Say it.", "output": "word " * 40}
    made = tokenize_files(write_array(tmp_path / "data.json", [record(1), long, record(2)]), max_length=32)
    assert len(made.train) == 2
    (rejected,) = made.rejected
    assert (rejected.record, rejected.line) == (1, None)
    assert rejected.reason.startswith("longer than max_length (")
    assert made.report.reasons == {"longer than max_length": 1}


def test_shortened_and_split_records_are_counted_and_the_rest_is_listed(tokenize_files: Any, tmp_path: Path) -> None:
    talk = [
        {"role": role, "content": f"{word} {word} {word}"}
        for word in ("one", "two", "three")
        for role in ("user", "assistant")
    ]
    records = [
        {"messages": talk},
        {"messages": talk[:2]},
        {"messages": [*talk, {**talk[0], "content": "word " * 90}, talk[1]]},
    ]
    file = write_array(tmp_path / "talk.json", records)
    split = tokenize_files(file, max_length=60, too_long="split", max_rejected_share=0.9)
    assert (split.report.read, split.report.kept, split.report.split, split.report.cut) == (3, 2, 1, 0)
    assert (split.report.train.records, split.report.train.rows) == (2, len(split.train))
    assert len(split.train) > 2
    assert [item.record for item in split.rejected] == [2]
    cut = tokenize_files(file, max_length=140, too_long="cut_prompt", max_rejected_share=0.9)
    assert (cut.report.kept, cut.report.split, cut.report.cut) == (3, 0, 1)
    assert max(len(ids) for ids, _ in cut.train) <= 140


@pytest.mark.parametrize("packing", ["none", "pack"])
def test_rows_in_the_shards_pass_the_proof(tokenize_files: Any, shared_data: Path, packing: str) -> None:
    base = shared_data / "models" / "zh-tiny-llama"
    file = shared_data / "instruction" / "sharegpt_zh_first200.jsonl"
    made = tokenize_files(
        file, tokenizer=base, base=base, template="chatml", max_length=1024, too_long="split", packing=packing
    )
    assert made.report.split > 20
    encoder = Encoder(base)
    rows = TokenRows(made.folder / "train")
    segments = 0
    for index in range(len(rows)):
        row = rows.row(index)
        found = split_packed(row.input_ids, row.labels, row.segment_ids)
        assert find_faults(found, encoder, encoder.eos_id) == []
        segments += len(found.starts) - 1
        wrong = split_packed(row.input_ids, np.append(row.labels[1:], np.int32(-100)), row.segment_ids)
        assert find_faults(wrong, encoder, encoder.eos_id)
    assert segments > made.report.train.records
    assert (segments > len(rows)) == (packing == "pack")


def test_the_system_turn_is_in_the_rows_and_in_the_report(tokenize_files: Any, hundred: Path, stories: Path) -> None:
    made = tokenize_files(hundred, template="chatml", system="Be kind.")
    assert made.report.system == "Be kind."
    encoder = Encoder(stories)
    assert all(encoder.decode(ids).startswith("<|im_start|>system\nBe kind.<|im_end|>") for ids, _ in made.train)


@pytest.mark.parametrize(("train_on", "share"), [("all", 1.0), ("last", 0.5)])
def test_real_conversations_train_on_their_answers(
    tokenize_files: Any, shared_data: Path, train_on: str, share: float
) -> None:
    base = shared_data / "models" / "zh-tiny-llama"
    file = shared_data / "instruction" / "sharegpt_zh_first200.jsonl"
    made = tokenize_files(
        file, tokenizer=base, base=base, template="chatml", max_length=16384, train_on=train_on, max_rejected_share=0.1
    )
    encoder = Encoder(base)
    records = [json.loads(line)["conversations"] for line in file.read_text(encoding="utf-8").splitlines()]
    rejected = {item.record for item in made.rejected}
    wanted = [
        [turn["value"] for turn in turns if turn["from"] == "gpt"]
        for number, turns in enumerate(records)
        if number not in rejected
    ]
    assert len(wanted) > 190
    for (_, labels), texts in zip(made.train, wanted, strict=True):
        trained = [label for label in labels if label != -100]
        ends = [-1, *(k for k, label in enumerate(trained) if label == encoder.eos_id)]
        found = [encoder.decode(trained[a + 1 : b]) for a, b in itertools.pairwise(ends)]
        assert found == (texts if train_on == "all" else texts[-1:])
    assert made.report.train.trained_tokens < share * made.report.train.tokens


def test_reasons_are_grouped_without_their_details(tokenize_files: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        json.dumps(record(1)),
        "{",
        '{"a" 1}',
        json.dumps({"instruction": "a", "output": 1}),
        json.dumps(record(2)),
    ]
    path.write_text("\n".join(lines), encoding="utf-8")
    made = tokenize_files(path)
    assert made.report.reasons == {"not valid JSON": 2}
    assert (made.report.read, made.report.kept, made.report.rejected, made.report.numbers_as_text) == (5, 3, 2, 1)
    assert [item.line for item in made.rejected] == [2, 3]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"instruction": "a", "output": None}, r"Record 1 \(line 2\) of data\.jsonl can't be used: output is null\."),
        ({"instruction": "a", "output": "b" * 600}, r"Record 1 \(line 2\) .* longer than max_length \(\d+ tokens\)\."),
        ({"instruction": "a", "output": "a\u2581"}, r"Record 1 \(line 2\) .* the tokenizer can't write the output\."),
    ],
)
def test_a_bad_record_stops_the_stage_where_it_is_told_to(
    tokenize_files: Any, tmp_path: Path, bad: dict[str, Any], message: str
) -> None:
    path = write_lines(tmp_path / "data.jsonl", [record(1), bad, record(2)])
    assert len(tokenize_files(path).train) == 2
    with pytest.raises(InputError, match=message) as caught:
        tokenize_files(path, on_bad="stop")
    assert (caught.value.code, caught.value.stage) == ("data.bad_record", "tokenize")


def test_too_many_rejected_records_are_an_error_that_shows_where(tokenize_files: Any, tmp_path: Path) -> None:
    path = write_array(tmp_path / "data.json", [{}, record(1), {"output": ""}, record(2), {"output": ""}])
    made = tokenize_files(path, max_rejected_share=0.6)
    assert made.report.reasons == {"output is empty": 2, "output is missing": 1}
    with pytest.raises(
        InputError,
        match=r"3 of 5 records can't be used, more than data.max_rejected_share \(0\.5\).*"
        r"output is empty: 2 \(Record 2 of data\.json, Record 4 of data\.json\); "
        r"output is missing: 1 \(Record 0 of data\.json\)\.$",
    ):
        tokenize_files(path)


@pytest.mark.parametrize(
    ("records", "share", "message"),
    [
        (
            [{"instruction": "a", "output": "b" * 600}] * 2,
            0,
            "2 read, 2 rejected, 0 held out.*longer than max_length: 2",
        ),
        ([{"instruction": "a", "output": "b"}], 0.999999, "1 read, 0 rejected, 1 held out. Reasons: none"),
    ],
)
def test_nothing_left_to_train_on_is_an_error(
    tokenize_files: Any, tmp_path: Path, records: list[Any], share: float, message: str
) -> None:
    with pytest.raises(InputError, match=f"No record is left to train on: {message}"):
        tokenize_files(write_array(tmp_path / "data.json", records), validation_share=share)


def test_a_validation_file_without_a_usable_record_is_an_error(
    tokenize_files: Any, hundred: Path, tmp_path: Path
) -> None:
    empty = write_lines(tmp_path / "validation.jsonl", [{"instruction": "a", "output": ""}])
    with pytest.raises(
        InputError, match=r"No record of data\.validation can be used.*Record 0 \(line 1\) of validation"
    ):
        tokenize_files(hundred, validation=[str(empty)])


def test_a_folder_is_read_in_the_order_of_its_files(tokenize_files: Any, stories: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    write_lines(folder / "2.jsonl", [record(2)])
    write_array(folder / "1.json", [record(1), {}])
    made = tokenize_files(folder)
    assert answers(Encoder(stories), made.train) == ["It is 1.", "It is 2."]
    assert made.rejected[0].source == "1.json"


def test_labels_are_checked_before_a_row_is_written(
    tokenize_files: Any, hundred: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(rows: Any) -> Any:
        segments = segments_of(rows)
        return replace(segments, labels=np.append(segments.labels[1:], np.int32(-100)))

    monkeypatch.setattr(masks, "segments_of", shifted)
    with pytest.raises(StageError, match=r"Record 0 \(line 1\) of hundred\.jsonl would be trained wrongly"):
        tokenize_files(hundred)


@pytest.mark.parametrize(
    ("config", "refused"),
    [('{"vocab_size": 511}', True), ('{"vocab_size": 512}', False), ("{}", False), ("[]", False), ("{", False)],
)
def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    stories: Path, tmp_path: Path, config: str, refused: bool
) -> None:
    (tmp_path / "config.json").write_text(config, encoding="utf-8")
    settings = LlmConfig.model_validate(
        {"model": {"base": str(tmp_path), "tokenizer": str(stories)}, "data": {"train": ["x"]}}
    )
    if not refused:
        assert open_encoder(settings).size == 512
        return
    with pytest.raises(InputError, match="token ids up to 511, the model's embedding only 511 rows"):
        open_encoder(settings)


def test_progress_ends_at_the_size_of_all_files(
    tokenize_files: Any, hundred: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenize, "PROGRESS_SECONDS", 0)
    monkeypatch.setattr(making, "BATCH_RECORDS", 40)
    second = write_array(tmp_path / "second.json", [record(number) for number in range(50)])
    total = hundred.stat().st_size + second.stat().st_size
    progress = tokenize_files(hundred, second).progress
    assert [done for done, _, _ in progress] == sorted(done for done, _, _ in progress)
    assert {of for _, of, _ in progress} == {total}
    assert progress[-1] == (total, total, "150 records")
    assert [text for _, _, text in progress[:4]] == ["40 records", "80 records", "100 records", "140 records"]
    assert hundred.stat().st_size < progress[3][0] <= total


def test_real_chinese_records_are_kept_but_for_those_without_an_answer(tokenize_files: Any, shared_data: Path) -> None:
    base = shared_data / "models" / "zh-tiny-llama"
    made = tokenize_files(
        shared_data / "instruction" / "alpaca_zh_part00.json",
        tokenizer=base,
        base=base,
        template="chatml",
        max_length=2048,
    )
    assert (made.report.read, made.report.kept) == (10021, 10015)
    assert made.report.reasons == {"output is empty": 6}
    assert [item.record for item in made.rejected] == [284, 1223, 1347, 1736, 7723, 9038]
    records = json.loads((shared_data / "instruction" / "alpaca_zh_part00.json").read_text(encoding="utf-8"))
    kept = [record["output"] for record in records if record["output"]]
    assert answers(Encoder(base), made.train[::100]) == kept[::100]


def test_a_weight_says_how_often_a_record_is_seen_and_held_out_records_are_seen_once(
    tokenize_files: Any, hundred: Path, tmp_path: Path
) -> None:
    more = write_lines(tmp_path / "more.jsonl", [record(number) for number in range(100, 200)])
    plain = tokenize_files(hundred, more, validation_share=0.2)
    weighted = tokenize_files(
        {"path": str(hundred), "weight": 2}, {"path": str(more), "weight": 0.5}, validation_share=0.2
    )
    first, second = weighted.report.sources
    assert (first.weight, first.train + first.held_out, first.seen, first.left_out) == (2, 100, 2 * first.train, 0)
    assert second.train + second.held_out + second.left_out == 100
    assert 30 < second.left_out < 70
    assert (second.weight, second.seen, second.rejected) == (0.5, second.train, 0)
    report = weighted.report
    assert report.read == report.kept + report.left_out + report.rejected == 200
    assert report.train.records == first.train + second.train
    assert report.train.rows == len(weighted.train) == first.seen + second.seen
    assert len(weighted.validation) == first.held_out + second.held_out
    assert [row for row in weighted.validation if row not in plain.validation] == []
    of_first = [row for row in plain.train if row in weighted.train[: first.seen]]
    assert weighted.train[: first.seen] == [row for row in of_first for _ in range(2)]


def test_files_of_any_kind_give_the_same_rows(tokenize_files: Any, tmp_path: Path) -> None:
    rows = [record(number) for number in range(5)]
    lines = write_lines(tmp_path / "a.jsonl", rows)
    table = tmp_path / "b.csv"
    keys = list(rows[0])
    table.write_text(
        "\n".join([",".join(keys), *(",".join(f'"{row[key]}"' for key in keys) for row in rows)]), encoding="utf-8"
    )
    assert tokenize_files(lines).train == tokenize_files(table).train == tokenize_files(tmp_path / "*.jsonl").train
