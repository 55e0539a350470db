"""Whatever a config holds in place of a field, it is planned or refused in one line (P7)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtide.plan import KV_FORMATS, PlanError, from_config, page_multiple, plan_kv_storage

from .published import PUBLISHED

ODD: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    2**31,
    10**30,
    10**5000,
    1.5,
    float("nan"),
    "",
    "sliding_attention",
    "FS",
    [],
    [None],
    [0],
    [10**9],
    [1] * 100,
    ["full_attention"],
    {},
    {"head_dim": []},
    {"5": {"head_dim": 0}},
    {"05": {"head_dim": 80, "num_key_value_heads": 3}},
    {"full_attn_layers": [1, "2"], "kda_layers": None},
    {"sparse_attention_freq": "all"},
]
"""What other people's JSON may hold where a number, a flag, a list or an object belongs."""


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = config.get("text_config", config)
    return text


@pytest.mark.requirement("P7")
@settings(max_examples=1500, deadline=None)
@given(data=st.data())
def test_an_odd_value_in_any_field_is_planned_or_refused_in_one_line(data: st.DataObject) -> None:
    """A traceback would blame us; a plan of no bytes would blame nobody."""
    config, _ = PUBLISHED[data.draw(st.sampled_from(sorted(PUBLISHED)))]
    text = dict(text_of(config))
    others = [
        "layer_types",
        "text_config",
        "num_nextn_predict_layers",
        "dtype",
        "torch_dtype",
        "per_layer_config",
    ]
    for _ in range(data.draw(st.integers(1, 2))):
        text[data.draw(st.sampled_from([*sorted(text), *others]))] = ODD[
            data.draw(st.integers(0, len(ODD) - 1))
        ]
    refusal = ""
    try:
        decls = from_config(
            text,
            kv_dtype=KV_FORMATS[data.draw(st.sampled_from(sorted(KV_FORMATS)))],
            tp_size=data.draw(st.sampled_from([1, 1, 2, 3, 8])),
            pp_size=data.draw(st.sampled_from([1, 1, 2])),
            checkpoint_interval=data.draw(st.sampled_from([None, 256])),
        )
        plan = plan_kv_storage(decls, page_tokens=max(16, page_multiple(decls)))
        assert all(0 < pool.unit.payload_bytes <= pool.unit.unit_bytes for pool in plan.sub_pools)
    except PlanError as error:
        refusal = str(error)
    assert "\n" not in refusal
    assert len(refusal) < 2000


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("model", PUBLISHED)
def test_a_list_shorter_than_the_layers_is_refused_naming_both_counts(model: str) -> None:
    """Filling it up would invent layers; cutting the model would lose some."""
    config, _ = PUBLISHED[model]
    text = text_of(config)
    lists = [
        name
        for name, value in text.items()
        if isinstance(value, list) and len(value) >= text["num_hidden_layers"]
    ]
    for name in lists:
        with pytest.raises(PlanError, match=rf"{name} names \d+ layers, but num_hidden_layers is \d+$"):
            from_config(text | {name: text[name][:3]})


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("interval", [0, -1, True, 2.5])
def test_a_senseless_checkpoint_interval_is_refused(interval: Any) -> None:
    """It would be found out at the first hit."""
    config, _ = PUBLISHED["Jamba-v0.1"]
    with pytest.raises(
        PlanError, match=r"^StateLifetime.checkpoint_interval must be a positive integer, found "
    ):
        from_config(config, checkpoint_interval=interval)
