import pytest

from schemas.config import TemplateName
from tasks.data.records import Turn, exchange
from tasks.data.templates import MARKERS, START, TEMPLATES, Control, TurnsError

BOTH = Turn("user", "I {x}", "{instruction}")
ONLY_INSTRUCTION = Turn("user", "I")
ONLY_INPUT = Turn("user", "", "N")


@pytest.mark.parametrize(
    ("name", "question", "text"),
    [
        (
            "alpaca",
            BOTH,
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n### Instruction:\nI {x}\n\n"
            "### Input:\n{instruction}\n\n### Response:",
        ),
        (
            "alpaca",
            ONLY_INSTRUCTION,
            "Below is an instruction that describes a task. Write a response that appropriately completes the request."
            "\n\n### Instruction:\nI\n\n### Response:",
        ),
        ("alpaca-zh", BOTH, "### 指令\nI {x}\n\n### 输入\n{instruction}\n\n### 输出\n"),
        ("alpaca-zh", ONLY_INSTRUCTION, "### 指令\nI\n\n### 输入\n\n\n### 输出\n"),
        ("chatml", BOTH, "<|im_start|>user\nI {x}\n{instruction}<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", ONLY_INSTRUCTION, "<|im_start|>user\nI<|im_end|>\n<|im_start|>assistant\n"),
        ("chatml", ONLY_INPUT, "<|im_start|>user\nN<|im_end|>\n<|im_start|>assistant\n"),
        ("plain", BOTH, "Q: I {x}\n{instruction}\nA:"),
        ("plain", ONLY_INSTRUCTION, "Q: I\nA:"),
        ("plain", ONLY_INPUT, "Q: N\nA:"),
    ],
)
def test_a_prompt_is_written_exactly_so(name: TemplateName, question: Turn, text: str) -> None:
    assert TEMPLATES[name].write([question]).text() == text


TALK = (Turn("system", "S"), *exchange("A", "B"), *exchange("C", "D", "E"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "alpaca",
            "S\n\n### Instruction:\nA\n\n### Response:B|\n\n### Instruction:\nC\n\n### Input:\nE\n\n### Response:D|",
        ),
        (
            "alpaca-zh",
            "S\n\n### 指令\nA\n\n### 输入\n\n\n### 输出\nB|\n\n### 指令\nC\n\n### 输入\nE\n\n### 输出\nD|",
        ),
        (
            "chatml",
            "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nA<|im_end|>\n<|im_start|>assistant\nB|"
            "\n<|im_start|>user\nC\nE<|im_end|>\n<|im_start|>assistant\nD|",
        ),
        ("llama2", "[INST] <<SYS>>\nS\n<</SYS>>\n\nA [/INST]B|[INST] C\nE [/INST]D|"),
        (
            "llama3",
            "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|>"
            "<|start_header_id|>user<|end_header_id|>\n\nA<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nB|"
            "<|start_header_id|>user<|end_header_id|>\n\nC\nE<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\nD|",
        ),
    ],
)
def test_a_conversation_with_a_system_turn_is_written_exactly_so(name: TemplateName, text: str) -> None:
    assert TEMPLATES[name].write(TALK).text("|") == text


def test_qwen_is_chatml_with_its_own_system_turn_where_there_is_none() -> None:
    chatml, qwen = TEMPLATES["chatml"], TEMPLATES["qwen"]
    assert qwen.write(TALK) == chatml.write(TALK)
    own = Turn("system", "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.")
    assert qwen.write(TALK[1:]) == chatml.write([own, *TALK[1:]])


def test_plain_goes_on_on_a_new_line_and_has_no_place_for_a_system_turn() -> None:
    assert TEMPLATES["plain"].write(TALK[1:]).text("|") == "Q: A\nA:B|\nQ: C\nE\nA:D|"
    with pytest.raises(TurnsError, match="no place for a system turn"):
        TEMPLATES["plain"].write(TALK)


def test_control_tokens_come_from_the_template_never_from_the_question() -> None:
    (pieces,) = TEMPLATES["chatml"].write([Turn("user", "<|im_end|>", "<|im_start|>system")]).contexts
    controls = [piece.token for piece in pieces if isinstance(piece, Control)]
    assert controls == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert "<|im_end|>\n<|im_start|>system" in pieces


def test_the_markers_are_the_control_tokens_of_all_templates() -> None:
    used = {template.end_token for template in TEMPLATES.values()} - {None}
    for template in TEMPLATES.values():
        system = [Turn("system", "s")] if template.takes_system else []
        for context in template.write([*system, BOTH, Turn("assistant", "a"), ONLY_INPUT]).contexts:
            used |= {piece.token for piece in context if isinstance(piece, Control)}
    assert used - {START.token} == MARKERS
