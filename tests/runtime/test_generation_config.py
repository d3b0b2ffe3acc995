"""Stop tokens of a checkpoint's generation config, in each form that checkpoints use."""

from __future__ import annotations

from pathlib import Path

import pytest

from medusa_engine.runtime.errors import UserError
from medusa_engine.runtime.generation_config import read_stop_token_ids

DATA = Path(__file__).parents[1] / "data" / "generation_config"


@pytest.mark.parametrize(
    ("name", "ids"),
    [("eos_int", (2,)), ("eos_list", (2, 7, 9)), ("eos_missing", ()), ("eos_null", ())],
)
def test_eos_token_id_may_be_one_id_a_list_null_or_missing(name: str, ids: tuple[int, ...]) -> None:
    assert read_stop_token_ids(DATA / f"{name}.json") == ids


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        '{"eos_token_id": "2"}',
        '{"eos_token_id": -1}',
        '{"eos_token_id": 2147483648}',
        '{"eos_token_id": true}',
        '{"eos_token_id": [2, null]}',
    ],
)
def test_a_config_without_valid_ids_is_a_user_error_that_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_stop_token_ids(path)
    assert str(path) in caught.value.problem


def test_a_missing_file_is_a_user_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        read_stop_token_ids(tmp_path / "generation_config.json")
    assert str(tmp_path / "generation_config.json") in caught.value.problem
