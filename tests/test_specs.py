# SPDX-License-Identifier: Apache-2.0
"""Names with settings: what is read, as which type, and what is refused in one sentence."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass, replace
from typing import Literal

import pytest

from sparse_rl.specs import LONGEST, build, refuse_unused, renamed, shortened


@dataclass(frozen=True)
class Thing:
    count: int = 1
    share: float = 0.5
    on: bool = False
    text: str | None = None
    kind: Literal["a", "b"] = "a"


def needs(leading: str, count: int, text: str = "x") -> tuple[str, int, str]:
    return leading, count, text


MAKERS = {"thing": Thing}


def thing(spec):
    return build("part", spec, MAKERS, first="count")


def test_settings_are_typed_and_all_forms_agree():
    count, share, on = random.randrange(-99, 99), random.random(), random.random() < 0.5
    expected = Thing(count=count, share=share, on=on, text="1", kind="b")
    settings = {"count": count, "share": share, "on": on, "text": "1", "kind": "b"}
    pairs = [f"{key}={value}" for key, value in settings.items()]
    assert thing("thing:" + ",".join(pairs)) == thing("thing: " + " , ".join(pairs)) == expected
    assert thing(f"thing:{count}," + ",".join(pairs[1:])) == expected
    assert thing("thing:" + json.dumps(settings)) == expected
    assert thing("thing") == thing('thing:{"text": null}') == Thing()
    assert thing('thing:{"text": "a,b=c"}') == Thing(text="a,b=c") and thing("thing:text=b=c") == Thing(text="b=c")
    assert thing("thing:share=3") == Thing(share=3.0) and thing('thing:{"share": 3}') == Thing(share=3.0)
    for text, value in (("TRUE", True), ("False", False), ("false", False)):
        assert thing(f"thing:on={text}").on is value
    assert build("part", "needs:count=3", {"needs": needs}, "first") == ("first", 3, "x")


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("count=1.5", "count is '1.5'; it takes a whole number."),
        ('{"count": 1.0}', "count is 1.0; it takes a whole number."),
        ('{"count": true}', "count is True; it takes a whole number."),
        ("many", "count is 'many'; it takes a whole number."),
        ("share=high", "share is 'high'; it takes a number."),
        ("share=nan", "share is 'nan'; it takes a number."),
        ('{"share": [1]}', "share is [1]; it takes a number."),
        ("on=no", "on is 'no'; it takes true or false."),
        ("on=1", "on is '1'; it takes true or false."),
        ('{"on": 1}', "on is 1; it takes true or false."),
        ('{"text": 3}', "text is 3; it takes a text."),
        ("kind=c", "kind is 'c'; choose one of a, b."),
        ("conut=3", "'conut' is not a setting of 'thing' (did you mean 'count'?); it takes count, share, on, text"),
        ("3,count=4", "count is given twice; give it once."),
        ("on=true,on=true", "on is given twice; give it once."),
        ('{"count": 1, "count": 1}', "its settings are not JSON (the key 'count' stands there twice)."),
        ('{"count": 1', "its settings are not JSON ("),
        ("", "nothing follows the colon; write 'thing' alone, or settings."),
        ("3,", "'' is not of the form key=value; where a value has a comma in it, write the settings as JSON"),
        ("3,4", "'4' is not of the form key=value"),
        ("text=", "'text=' is not of the form key=value"),
        ("=3", "'=3' is not of the form key=value"),
    ],
)
def test_what_is_wrong_is_named_with_its_spec(settings, said):
    spec = f"thing:{settings}"
    with pytest.raises(ValueError, match="part") as caught:
        thing(spec)
    assert str(caught.value).startswith(f"part {spec!r}: {said}")


def test_names_that_are_none_and_settings_that_are_missing():
    with pytest.raises(ValueError, match=r"part 'thnig:3': 'thnig' is unknown \(did you mean 'thing'\?\); choose"):
        thing("thnig:3")
    with pytest.raises(ValueError, match=r"part 'needs': 'count' is missing; write needs:count=\.\.\."):
        build("part", "needs", {"needs": needs}, "first")
    with pytest.raises(ValueError, match="'leading' is not a setting of 'needs'; it takes count, text"):
        build("part", "needs:leading=3", {"needs": needs}, "first")


def test_a_maker_s_own_error_loses_its_section():
    def refuses(budget: int) -> None:
        raise ValueError(f"kv.budget is {budget}; it must be larger.")

    with pytest.raises(ValueError, match=r"^cache 'small:1': budget is 1; it must be larger\.$"):
        build("cache", "small:1", {"small": refuses}, first="budget")


@pytest.mark.parametrize(("name", "value"), [("count", 0), ("share", 0.0), ("on", True), ("text", ""), ("kind", "b")])
def test_a_setting_that_nothing_reads_is_refused_unless_it_is_the_default(name, value):
    given = replace(Thing(), **{name: value})
    others = [field for field in Thing.__dataclass_fields__ if field != name]
    for names in ((), (name,), (*others, name)):
        refuse_unused(Thing(), "part", "nobody reads it", *names)
        with pytest.raises(ValueError, match=rf"^part\.{name} is given, but nobody reads it\.$"):
            refuse_unused(given, "part", "nobody reads it", *names)
    refuse_unused(given, "part", "nobody reads it", *others)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("--", "--top-p is 2 (--top-k, too); not of a/kv.top_p or 'kv.top_p'"),
        ("eval.", "eval.top_p is 2 (eval.top_k, too); not of a/kv.top_p or 'kv.top_p'"),
        ("", "top_p is 2 (top_k, too); not of a/kv.top_p or 'kv.top_p'"),
    ],
)
def test_a_setting_has_the_name_that_its_reader_knows(name, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}$"), renamed("kv", name):
        raise ValueError("kv.top_p is 2 (kv.top_k, too); not of a/kv.top_p or 'kv.top_p'")


@pytest.mark.parametrize("form", ["{}", "'{}'", '"{}"', "[{}]", "{{{}}}", "task.train_file={}"])
@pytest.mark.parametrize("text", ["w", "a b "])
def test_long_values_of_an_error_are_cut(form, text):
    if text == "a b " and "{}" in (form, form[-2:]):
        return  # nobody can tell where it ends
    before, after = "the model's own setting is ", ", which isn't one; it's to be another, the user's"
    long, short = form.format(text * 5000), form.format("value"[: LONGEST // 40])
    found = shortened(before + long + after)
    assert found.startswith(before + long[:100]) and found.endswith(after) and len(found) < LONGEST + 60 + len(after)
    assert shortened(before + short + after) == before + short + after
    prose = "the model's words " * 40 + "aren't a value"
    assert shortened(prose) == prose
