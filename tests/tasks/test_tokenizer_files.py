import pytest

from schemas.errors import InputError
from tasks.tokenizer_files import check_tokenizer, copy_tokenizer, open_tokenizer


def test_a_folder_is_opened_as_it_is(stories):
    with open_tokenizer(stories) as folder:
        assert folder == stories
    assert folder.is_dir()


def test_only_tokenizer_files_are_copied(stories, tmp_path):
    names = copy_tokenizer(stories, tmp_path)
    assert set(names) == {path.name for path in tmp_path.iterdir()}
    assert set(names) == {"tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"}


def test_a_folder_without_a_vocabulary_is_refused(stories, tmp_path):
    check_tokenizer(stories)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"holds no tokenizer: none of tokenizer\.json, tokenizer\.model"):
        check_tokenizer(tmp_path)


def test_a_file_of_a_gguf_name_that_is_none_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"nothing")
    with pytest.raises(InputError, match="it is not a GGUF file"):
        check_tokenizer(tmp_path / "x.gguf")
