# SPDX-License-Identifier: Apache-2.0
"""What EvalPlus's files leave unsaid: arguments that JSON holds as lists, and tasks with more than one right answer.

Facts of EvalPlus 0.3 (https://github.com/evalplus/evalplus): `mbpp_deserialize_inputs` and `_special_oracle`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_Turn = Callable[[Any], Any]


def _tuples(value: Any) -> Any:
    return [tuple(item) for item in value]


def _tuple_of_tuples(value: Any) -> Any:
    return tuple(tuple(item) for item in value)


def _deep(value: Any) -> Any:
    return tuple(_deep(item) for item in value) if isinstance(value, list) else value


def _each(turn: _Turn) -> _Turn:
    return lambda given: [turn(value) for value in given]


def _first(turn: _Turn) -> _Turn:
    return lambda given: [turn(given[0]), *given[1:]]


_GROUPS: list[tuple[str, _Turn]] = [
    ("2 116 132 143 222 261 273 394 399 421 424 429 470 560 579 596 616 630 726 740 744 809", _each(tuple)),
    ("63 64 70 94 120 237 272 299 400 409 417 438 473 614 780", _each(_tuples)),
    ("75 413 444 753", _first(_tuples)),
    ("106 750", lambda given: [given[0], tuple(given[1])]),
    ("115", _first(lambda value: [set(item) if isinstance(item, list) and item else {} for item in value])),
    ("124", lambda given: [float(given[0]), complex(given[1])]),
    ("250 405 446 617 720 763 808 307", _first(tuple)),
    ("259 401 445", _each(_tuple_of_tuples)),
    ("278", _first(lambda value: tuple(tuple(item) if isinstance(item, list) else item for item in value))),
    ("722", _first(lambda value: {key: tuple(item) for key, item in value.items()})),
    ("252", _first(complex)),
    ("580 615 791", _each(_deep)),
]
_TURNS = {f"Mbpp/{number}": turn for numbers, turn in _GROUPS for number in numbers.split()}

_MBPP_ORACLES = {
    "are_equivalent": "any",
    "sum_div": "or_zero",
    "surface_Area": "surface_area",
    "digit_distance_nums": "digit_distance",
    **dict.fromkeys(("check_str", "text_match_three", "text_starta_endb"), "not_none"),
    **dict.fromkeys(
        (
            "similar_elements",
            "find_char_long",
            "common_in_nested_lists",
            "extract_singly",
            "larg_nnum",
            "intersection_array",
            "find_dissimilar",
            "Diff",
        ),
        "set",
    ),
}


def arguments(task: str, inputs: list[Any]) -> list[Any]:
    """The arguments of each call, with the types that the task's function takes."""
    turn = _TURNS.get(task)
    return [turn(given) for given in inputs] if turn else inputs


def oracle(task: str, entry_point: str) -> str:
    """How the task is judged: the name of an oracle of `compare`, "" for plain comparison."""
    if task.startswith("Mbpp/"):
        return _MBPP_ORACLES.get(entry_point, "")
    return "root" if entry_point == "find_zero" else ""
