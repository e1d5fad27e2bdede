"""What would run, what would be reused, and why: keys and decisions, computed without Prefect or MindSpore.

The key of a stage is the SHA-256 of one document: stage and version, the settings that it uses, the digests of its
inputs, the code and the library versions that can change its output. A stage whose input is not there yet has no key.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any, Literal

from schemas.config import LlmConfig
from schemas.errors import InputError
from schemas.manifest import ArtifactRef, Manifest, StageName
from schemas.reports import EnvReport
from tasks.code import code_digests
from tasks.data.first_look import check_data
from tasks.environment import guess_device
from tasks.files import digest_of
from tasks.fingerprint import FileDigests, source_digest
from tasks.locations import base_path, not_downloaded, tokenizer_path
from tasks.models.spec import check_tensors, match_targets, read_spec
from tasks.precision import check_precision
from tasks.stages import STAGES, Stage
from tasks.store import Store
from tasks.tokenizer_files import check_tokenizer

Device = Literal["CPU", "Ascend"]


@dataclass(frozen=True)
class Decision:
    """What happens to one stage, and why.

    Args:
        stage: the stage.
        ref: the artifact that is reused; None when the stage has to run.
        reason: one line for the log.
        key_document: what the key is the digest of; None while an input is missing.
        sources: digests of the outside inputs, by name.
        code_only: a run is needed only because code changed; `--accept-code` would reuse.
    """

    stage: StageName
    ref: ArtifactRef | None
    reason: str
    key_document: dict[str, Any] | None
    sources: dict[str, str]
    code_only: bool = False

    @property
    def key(self) -> str | None:
        """The stage's key; None while an input is missing."""
        return None if self.key_document is None else digest_of(self.key_document)


class Planner:
    """Computes keys and decisions for one configuration.

    Args:
        store: where finished artifacts lie.
        config: the run's configuration.
        force: stages that are made again although they could be reused.
        accept_code: reuse an artifact that only a change of code would make again.
        deep: check the files of an artifact by their digests before it is reused.
    """

    def __init__(
        self,
        store: Store,
        config: LlmConfig,
        force: tuple[StageName, ...] = (),
        accept_code: bool = False,
        deep: bool = False,
    ) -> None:
        self._store = store
        self._config = config
        self._force = force
        self._accept_code = accept_code
        self._deep = deep
        self._digests = FileDigests(store.root / "work" / "file-digests.json")

    def plan(self) -> list[Decision]:
        """The decisions for all stages, in order."""
        decisions: list[Decision] = []
        made: dict[StageName, ArtifactRef] = {}
        device = self.guess_device()
        absent = not_downloaded(self._config.model)
        for stage in STAGES.values():
            if absent and {"base", "tokenizer"} & set(stage.sources):
                reason = f"the base model is not downloaded yet ({', '.join(absent)})"
                decisions.append(Decision(stage.name, None, reason, None, {}))
                continue
            waiting = [name for name in stage.takes if name not in made]
            if waiting:
                reason = f"{' and '.join(waiting)} will be made first"
                decisions.append(Decision(stage.name, None, reason, None, {}))
                continue
            decision = self.decide(stage, {name: made[name] for name in stage.takes}, device)
            decisions.append(decision)
            if decision.ref is not None:
                made[stage.name] = decision.ref
            if stage.name == "validate_env" and decision.ref is not None:
                device = device_of(self._store, decision.ref)
        self._digests.save()
        return decisions

    def guess_device(self) -> Device:
        """The device kind that planning assumes before `validate_env` has tried it."""
        return guess_device(self._config.env.device)

    def decide(self, stage: Stage, inputs: Mapping[StageName, ArtifactRef], device: Device) -> Decision:
        """Whether a stage's artifact can be reused, and why.

        Args:
            stage: the stage.
            inputs: the artifacts that it takes.
            device: the device kind that it would run on.
        """
        sources = {name: source_digest(name, self._config, self._digests) for name in stage.sources}
        self._digests.save()
        document = self._key_document(stage, inputs, sources, device)
        key = digest_of(document)
        if stage.name in self._force:
            return Decision(stage.name, None, "asked for (--force)", document, sources)
        deep = self._deep or stage.name == "validate_env"  # its report says the device, also when nothing has to run
        ref, problem = self._store.find(stage.name, key, deep)
        if ref is not None:
            return Decision(stage.name, ref, "nothing that it depends on has changed", document, sources)
        if self._store.folder(stage.name, key).exists():
            return Decision(stage.name, None, problem, document, sources)
        nearest = nearest_manifest(self._store.manifests(stage.name), document)
        if nearest is None:
            return Decision(stage.name, None, "no earlier artifact", document, sources)
        changes = list(differences(nearest.key_document, document))
        code_only = all(change.path[0] == "code" for change in changes)
        if code_only and self._accept_code:
            ref, problem = self._store.find(stage.name, nearest.key, self._deep)
            if ref is not None:
                return Decision(stage.name, ref, f"accepted although {_describe(changes)}", document, sources)
        return Decision(stage.name, None, _describe(changes), document, sources, code_only)

    def _key_document(
        self, stage: Stage, inputs: Mapping[StageName, ArtifactRef], sources: Mapping[str, str], device: Device
    ) -> dict[str, Any]:
        document: dict[str, Any] = {
            "stage": stage.name,
            "stage_version": stage.version,
            "config": {name: getattr(self._config, name).key_fields() for name in stage.sections},
            "inputs": {name: inputs[name].digest for name in stage.takes},
            "sources": dict(sources),
            "libraries": {name: _version(name) for name in stage.libraries},
            "code": code_digests(f"tasks.{stage.name}"),
        }
        if stage.on_device:
            document["device"] = device
        return document


def check_inputs(config: LlmConfig, stages: Sequence[StageName] = tuple(STAGES)) -> None:
    """Refuse, before any work, what can be seen to be wrong with data, tokenizer and base model.

    A base model that is not downloaded yet is not looked at.

    Args:
        config: the configuration.
        stages: the stages that will run; what none of them reads is not looked at.

    Raises:
        InputError: a file is missing or unusable, or a setting does not fit the base model.
        ConfigError: the device can't compute in train.precision.
    """
    if "train" in stages:
        check_precision(config.train.precision, guess_device(config.env.device))
    sources = {source for stage in stages for source in STAGES[stage].sources}
    if "data" in sources:
        check_data(config.data)
    if not sources & {"base", "tokenizer"} or not_downloaded(config.model):
        return
    base = base_path(config.model)
    spec = read_spec(base)
    check_tensors(base, spec)
    check_tokenizer(tokenizer_path(config.model))
    match_targets(config.train.lora.target_modules, spec)
    for field, value in (
        ("export.cache_length", config.export.cache_length),
        ("tokenize.max_length", config.tokenize.max_length),
    ):
        if value > spec.positions:
            raise InputError("model.too_short", field=field, value=value, positions=spec.positions)


@dataclass(frozen=True)
class Change:
    """One place where two key documents differ."""

    path: tuple[str, ...]
    old: Any
    new: Any

    def __str__(self) -> str:
        """One line for people: settings by value, digests by name."""
        kind, *rest = self.path
        name = ".".join(rest)
        if kind == "code":
            return f"code of {name} changed"
        if kind in ("inputs", "sources"):
            return f"{name} changed" if kind == "sources" else f"the {name} artifact is another one"
        if kind == "config":
            return f"{name}: {_short(self.old)} -> {_short(self.new)}"
        return f"{'.'.join(self.path)}: {_short(self.old)} -> {_short(self.new)}"


def differences(old: Any, new: Any, path: tuple[str, ...] = ()) -> Iterator[Change]:
    """The leaves at which two JSON documents differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from differences(old.get(name), new.get(name), (*path, name))
    elif old != new:
        yield Change(path, old, new)


def device_of(store: Store, env: ArtifactRef) -> Device:
    """The device kind that `validate_env` chose."""
    text = (store.open(env) / "report.json").read_text(encoding="utf-8")
    return EnvReport.model_validate_json(text).device


def nearest_manifest(manifests: Iterator[Manifest], document: Mapping[str, Any]) -> Manifest | None:
    """The manifest whose key document differs least from a document; the newest of equals.

    A change of code alone counts as nearer than any other.
    """

    def distance(manifest: Manifest) -> tuple[int, int]:
        changes = list(differences(manifest.key_document, dict(document)))
        return sum(change.path[0] != "code" for change in changes), len(changes)

    return min(manifests, key=distance, default=None)  # min keeps the first of equals, and newest come first


def explain(store: Store, ref: ArtifactRef) -> tuple[Manifest, Manifest | None, list[Change]]:
    """An artifact, the nearest one that was there before it, and where their keys differ.

    Raises:
        StoreError: the artifact is gone or damaged.
    """
    manifest = store.read_manifest(store.open(ref))
    earlier = (other for other in store.manifests(ref.stage) if other.created < manifest.created)
    nearest = nearest_manifest(earlier, manifest.key_document)
    changes = [] if nearest is None else list(differences(nearest.key_document, manifest.key_document))
    return manifest, nearest, changes


def _describe(changes: list[Change]) -> str:
    shown = "; ".join(str(change) for change in changes[:3])
    return shown + (f"; and {len(changes) - 3} more" if len(changes) > 3 else "")


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."


@cache
def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"
