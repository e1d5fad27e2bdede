"""Each family against Transformers and PEFT on PyTorch; make_fixtures.py says how the expected numbers were made."""

import json
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from list_rows import ListRows
from safetensors.numpy import load_file

from tasks.batches import collate
from tasks.models.adapter import read_adapter, tensor_names
from tasks.models.families import FAMILIES
from tasks.models.forward import logits_at
from tasks.models.generation import Generator
from tasks.models.loading import load_decoder
from tasks.models.lora import attach_adapter
from tasks.models.loss import AnswerLoss
from tasks.models.parity import relative_difference
from tasks.models.spec import read_spec

DATA = Path(__file__).with_name("data")
NAMES = sorted(path.name for path in DATA.iterdir())
WINDOWED = [name for name in NAMES if read_spec(DATA / name).window]
TOLERANCE = 1e-4  # largest difference of a tensor, relative to its largest value
CHUNK = 8  # tokens of a prompt; the texts take three, the last one padded


def load_adapted(name):
    decoder = load_decoder(DATA / name)
    attach_adapter(decoder, read_adapter(DATA / name))
    return decoder


def expected(name):
    return load_file(DATA / name / "expected.safetensors")


def loss_and_gradients(name, batch, packed):
    """Mean loss, and the gradients for the adapter's tensors by PEFT's names."""
    decoder = load_adapted(name)
    weights = [weight for weight in decoder.get_parameters() if weight.name.endswith((".lora_a", ".lora_b"))]
    for weight in weights:
        weight.requires_grad = True
    call = ms.value_and_grad(AnswerLoss(decoder), None, ms.ParameterTuple(weights), has_aux=True)
    arrays = [batch.input_ids, batch.labels, batch.places] + [batch.segment_ids, batch.positions] * packed
    (loss, count), gradients = call(*map(ms.Tensor, arrays))
    found = {}
    for weight, gradient in zip(weights, gradients, strict=True):
        layer, kind = weight.name.rsplit(".", 1)
        found[tensor_names(layer)[kind == "lora_b"]] = gradient.asnumpy() / float(count)
    return float(loss) / float(count), found


def check_against_peft(wanted, loss, gradients):
    assert loss == pytest.approx(float(wanted["loss"]), rel=1e-5)
    assert gradients.keys() == {name for name in wanted if "lora" in name}
    differences = {name: relative_difference(gradient, wanted[name]) for name, gradient in gradients.items()}
    worst = max(differences, key=differences.get)
    assert differences[worst] < TOLERANCE, worst


def test_there_is_a_fixture_of_each_family():
    configs = [json.loads((DATA / name / "config.json").read_text()) for name in NAMES]
    assert {config["architectures"][0] for config in configs} == set(FAMILIES)


@pytest.mark.parametrize("name", NAMES)
def test_logits_with_an_adapter_are_those_of_peft(name):
    wanted = expected(name)
    ids = wanted["input_ids"]
    found = logits_at(load_adapted(name), ids, range(ids.shape[1]))
    assert relative_difference(found, wanted["logits"]) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_an_adapter_are_those_of_peft(name):
    wanted = expected(name)
    ids, labels = wanted["input_ids"], wanted["labels"]
    records = [[record] for record in zip(ids, labels, strict=True)]
    batch = collate(ListRows(*records), range(len(ids)), len(ids), ids.shape[1])
    check_against_peft(wanted, *loss_and_gradients(name, batch, packed=False))


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_counts_within_the_segments_of_a_packed_row(name):
    wanted = expected(name)
    records = list(zip(wanted["input_ids"], wanted["labels"], strict=True))
    batch = collate(ListRows(records), [0], 1, wanted["input_ids"].size + 3)
    check_against_peft(wanted, *loss_and_gradients(name, batch, packed=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_cache_gives_the_logits_of_transformers(name):
    wanted = expected(name)
    generator = Generator.from_decoder(load_decoder(DATA / name), wanted["input_ids"].shape[1], CHUNK)
    for ids, logits in zip(wanted["input_ids"].tolist(), wanted["base_logits"], strict=True):
        assert relative_difference(generator.logits(ids), logits) < TOLERANCE
        list(generator.prefill(ids[:9]))
        decoded = np.stack([generator.decode(ids[position], position) for position in range(9, len(ids))])
        assert relative_difference(decoded, logits[9:]) < TOLERANCE
