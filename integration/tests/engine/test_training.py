"""The script that trains the demo's models does train, and what it ships loads."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from kvtide.engine.check import generate_alone
from kvtide.engine.models import MODELS, TRAINED, load_trained
from kvtide.engine.requests import Request

SCRIPT = Path(__file__).resolve().parents[3] / "tools" / "train_tiny.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_paragraphs_flow(script: ModuleType) -> None:
    """A hard line break or an indent is nothing to learn."""
    assert script.flowing("  One  line\n  and more.\n\n\n   Next.\n") == "One line and more.\nNext."


def test_the_rate_rises_then_falls(script: ModuleType) -> None:
    rates = [script.rate(step, 1000) for step in range(1000)]
    assert rates.index(max(rates)) in range(script.WARM_UP_STEPS - 5, script.WARM_UP_STEPS + 1)
    assert rates[-1] == pytest.approx(script.PEAK_RATE / 10, rel=0.01)


def test_a_few_steps_learn_something(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    """From even odds over 128 bytes toward the six that occur."""
    config = AutoConfig.from_pretrained(TRAINED / "gemma3")
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    script.train(model, torch.tensor(list(b"abcdef" * 100)), 4)
    losses = [float(line.split("loss ")[1].split(",")[0]) for line in capsys.readouterr().out.splitlines()]
    assert losses[0] == pytest.approx(torch.log(torch.tensor(128.0)).item(), abs=0.3)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.is_text])
def test_trained_weights_are_carried_in_bf16_and_run_in_fp32(name: str) -> None:
    with safe_open(TRAINED / name / "model.safetensors", framework="pt") as file:
        stored = {str(file.get_slice(key).get_dtype()) for key in file.keys()}  # noqa: SIM118  # not a mapping
    assert stored == {"BF16"}
    assert load_trained(TRAINED / name).dtype == torch.float32
    assert json.loads((TRAINED / name / "config.json").read_text(encoding="utf-8"))["vocab_size"] == 128


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if model.is_text])
def test_trained_models_write_english(name: str) -> None:
    prompt = b"You may not use this file except in compliance with "
    request = Request(request_id="a", prompt=tuple(prompt), output_tokens=40)
    text = bytes(generate_alone(MODELS[name].load(), request)).decode("ascii")
    assert set(text.lower().split()) & {"the", "a", "of", "to", "this", "and", "is"}, text
