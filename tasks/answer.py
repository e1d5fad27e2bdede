"""Answers to single prompts from an exported model: what `mindtune generate` does."""

from pathlib import Path
from typing import Any, Literal

from schemas.config import TemplateName
from schemas.errors import ConfigError


def answer(
    mindir: Path,
    template: TemplateName,
    prompt: str,
    *,
    device: Literal["CPU", "Ascend"],
    max_new_tokens: int,
    temperature: float,
    top_p: float,
    seed: int,
    system: str | None = None,
) -> dict[str, Any]:
    """Answer an instruction with the MindIR of an `export` artifact.

    Args:
        mindir: folder of the artifact.
        template: how an instruction becomes a prompt; the one that the model was trained with.
        prompt: the instruction.
        device: where to compute.
        max_new_tokens: longest answer, tokens.
        temperature: 0 is greedy.
        top_p: share of the probability that is kept.
        seed: seed of the draws.
        system: system turn before the instruction; the one that the model was trained with.

    Returns:
        text, tokens (count), stopped (by itself), first_token_seconds, tokens_per_second.

    Raises:
        ConfigError: a setting is out of range (generate.setting).
        InputError: prompt and answer don't fit the cache (generate.too_long).
    """
    from tasks.data.chat_template import open_template
    from tasks.data.encoding import Encoder
    from tasks.data.records import Turn
    from tasks.models.device import use_device
    from tasks.models.generation import Generator

    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # the terminal sent bytes that are no text
        raise ConfigError("generate.setting", name="The prompt", wanted="UTF-8 text", value=ascii(prompt)) from error
    use_device(device)
    encoder = Encoder(mindir)
    style = open_template(template, encoder, system)
    made = Generator.from_mindir(mindir).generate(
        encoder.prompt_ids([Turn("user", prompt)], style, system),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        seed=seed,
        stop_ids={*encoder.end_ids(style), encoder.eos_id},
    )
    return {
        "text": encoder.decode(made.ids),
        "tokens": len(made.ids),
        "stopped": made.stopped,
        "first_token_seconds": round(made.first_token_seconds, 4),
        "tokens_per_second": round(made.decoded / made.decode_seconds, 1) if made.decode_seconds > 0 else 0.0,
    }
