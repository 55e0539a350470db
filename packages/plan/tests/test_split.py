"""What one rank of a tensor-parallel or pipeline-parallel group holds (P7, S4)."""

from __future__ import annotations

from typing import Any

import pytest

from kvtide.plan import (
    ConfigError,
    KVLayerDecl,
    PlanError,
    from_config,
    page_multiple,
    plan_kv_storage,
    split_stages,
)

from .published import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V32,
    FALCON_H1_34B,
    GEMMA4_26B,
    GEMMA4_E2B,
    JAMBA_V01,
    KIMI_LINEAR,
    LFM2_12B,
    LLAMA_31_8B,
    MIMO_V2_FLASH,
    MINIMAX_TEXT_01,
    NEMOTRON_3_NANO,
    PUBLISHED,
    QWEN3_NEXT,
)

KV = 2 * 2


def bands_of(config: dict[str, Any], **options: Any) -> dict[str, int]:
    decls = from_config(config, **options)
    plan = plan_kv_storage(decls, page_tokens=max(16, page_multiple(decls)))
    return {pool.name: pool.payload_bytes_per_token for pool in plan.sub_pools}


TP: dict[str, tuple[dict[str, Any], int, dict[str, int]]] = {
    "kv heads are split": (LLAMA_31_8B, 4, {"full": 32 * 2 * 128 * KV}),
    "ranks beyond the kv heads hold copies": (LLAMA_31_8B, 32, {"full": 32 * 1 * 128 * KV}),
    "latents and indexer keys lie whole on every rank": (DEEPSEEK_V32, 16, {"full": 61 * (576 * 2 + 132)}),
    "global and window heads are split apart": (
        GEMMA4_26B,
        4,
        {"window-1024": 25 * 2 * 256 * KV, "full": 5 * 1 * 512 * 2},
    ),
    "window heads have a count of their own": (
        MIMO_V2_FLASH,
        8,
        {"window-129": 39 * 1 * 320 * 2, "full": 9 * 1 * 320 * 2},
    ),
    "delta nets split key and value heads": (
        QWEN3_NEXT,
        4,
        {
            "state": 36 * ((2 * 4 + 8) * 128 * 3 * 2 + 8 * 128 * 128 * 4),
            "full": 12 * 1 * 256 * KV,
        },
    ),
    "mamba-2 copies groups that ranks outnumber": (
        FALCON_H1_34B,
        4,
        {"state": 72 * ((1024 + 2 * 1 * 256) * 3 * 2 + 1024 * 256 * 4), "full": 72 * 1 * 128 * KV},
    ),
    "mamba-2 splits groups": (
        NEMOTRON_3_NANO,
        8,
        {"state": 23 * ((8 * 64 + 2 * 1 * 128) * 3 * 2 + 8 * 64 * 128 * 4), "full": 6 * 1 * 128 * KV},
    ),
    "mamba-1 splits channels": (
        JAMBA_V01,
        4,
        {"state": 28 * (2048 * 3 * 2 + 2048 * 16 * 4), "full": 4 * 2 * 128 * KV},
    ),
    "short convolutions split channels": (LFM2_12B, 2, {"state": 10 * 1024 * 2 * 2, "full": 6 * 4 * 64 * KV}),
    "kda splits heads, its latent is whole": (
        KIMI_LINEAR,
        8,
        {"state": 20 * (3 * 4 * 128 * 3 * 2 + 4 * 128 * 128 * 4), "full": 7 * 576 * 2},
    ),
    "lightning splits query heads": (
        MINIMAX_TEXT_01,
        8,
        {"state": 70 * 8 * 128 * 128 * 4, "full": 10 * 1 * 128 * KV},
    ),
    "V4 has one row for all heads": (DEEPSEEK_V4_FLASH, 8, bands_of(DEEPSEEK_V4_FLASH)),
}


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("case", TP)
def test_a_tensor_parallel_rank_holds_its_share(case: str) -> None:
    """The budget is a rank's, so the bytes must be too."""
    config, tp_size, bands = TP[case]
    assert bands_of(config, tp_size=tp_size) == bands


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("config", "tp_size", "text"),
    [
        (LLAMA_31_8B, 3, "num_attention_heads = 32 is not divided by tp_size = 3"),
        (
            LLAMA_31_8B | {"num_attention_heads": 24, "num_key_value_heads": 8, "head_dim": 128},
            12,
            "num_key_value_heads",
        ),
        (
            QWEN3_NEXT | {"linear_num_key_heads": 6},
            4,
            "linear_num_key_heads = 6 is not divided by tp_size = 4",
        ),
        (
            FALCON_H1_34B | {"num_attention_heads": 24},
            3,
            "num_key_value_heads = 4 is neither divided by tp_size = 3 nor",
        ),
        (DEEPSEEK_V32, 7, "num_attention_heads = 128 is not divided by tp_size = 7"),
    ],
)
def test_heads_that_ranks_do_not_divide_are_refused(config: dict[str, Any], tp_size: int, text: str) -> None:
    """Ranks would hold different bytes; the line names the field and both numbers."""
    with pytest.raises(ConfigError) as caught:
        from_config(config, tp_size=tp_size)
    assert str(caught.value).startswith(text)


@pytest.mark.requirement("P7", "S4")
@pytest.mark.parametrize("model", PUBLISHED)
@pytest.mark.parametrize("pp_size", [1, 2, 3, 5])
def test_stages_hold_every_layer_once_and_as_evenly_as_can_be(model: str, pp_size: int) -> None:
    """A layer on two stages would be stored twice, one on none would have no memory."""
    config, _ = PUBLISHED[model]
    whole = from_config(config)
    count = len(whole)
    stage_of = [
        stage for stage in range(pp_size) for _ in range(count // pp_size + (stage < count % pp_size))
    ]
    if any(
        decl.shares_layer is not None and stage_of[decl.layer] != stage_of[decl.shares_layer]
        for decl in whole
    ):
        with pytest.raises(PlanError, match=r"without layer \d+, whose entries it shares"):
            from_config(config, pp_size=pp_size)
        return
    stages = [from_config(config, pp_size=pp_size, pp_rank=rank) for rank in range(pp_size)]
    assert tuple(decl for stage in stages for decl in stage) == whole
    assert max(map(len, stages)) - min(map(len, stages)) <= 1
    assert [len(stage) for stage in stages] == sorted(map(len, stages), reverse=True)


@pytest.mark.requirement("P7")
@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"pp_size": 33}, "pp_size = 33 is more than the 32 layers"),
        ({"pp_size": 0}, "pp_size must be a positive integer, found 0"),
        ({"pp_size": 2, "pp_rank": 2}, "pp_rank must lie in [0, pp_size = 2), found 2"),
        ({"pp_rank": True}, "pp_rank must lie in [0, pp_size = 1), found True"),
        ({"tp_size": -2}, "tp_size must be a positive integer, found -2"),
    ],
)
def test_senseless_group_sizes_are_refused(options: dict[str, Any], text: str) -> None:
    """One line with the argument and its value."""
    with pytest.raises(PlanError) as caught:
        from_config(LLAMA_31_8B, **options)
    assert str(caught.value) == text


def test_stages_of_layers_declared_by_hand() -> None:
    """The cut asks nothing of a config."""
    layers = [KVLayerDecl(index, ()) for index in range(7)]
    assert [[decl.layer for decl in stage] for stage in split_stages(reversed(layers), 3)] == [
        [0, 1, 2],
        [3, 4],
        [5, 6],
    ]
    with pytest.raises(PlanError, match="pp_size = 2 puts layer 6 on stage 1 without layer 0"):
        split_stages([*layers[:6], KVLayerDecl(6, (), shares_layer=0)], 2)


def test_gemma_4_e2b_runs_in_one_stage() -> None:
    """Its last 20 layers read two layers of the first 15."""
    assert len(from_config(GEMMA4_E2B)) == 35
