"""Train the demo's two small language models on text that every machine has: licences and the docstrings of Python's library.

    python3 tools/dev.py run python tools/train_tiny.py gemma3

One token is one byte of ASCII, so there is no tokenizer. A model's shape is the `config.json` beside its weights in
`integration/src/kvtide/engine/trained`; the weights are written there in bf16 unless `--output` names another folder. The
licences are Debian's (`/usr/share/common-licenses`) and those that installed packages bring. Another Python or another set of
packages is another text, and so other weights. One core is busy for about a quarter of an hour a model.
"""

import argparse
import ast
import importlib.metadata
import math
import re
import shutil
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

ROOT = Path(__file__).resolve().parent.parent
TRAINED = ROOT / "integration" / "src" / "kvtide" / "engine" / "trained"
LICENCES = Path("/usr/share/common-licenses")

BATCH_ROWS = 8
BATCH_TOKENS = 192
PEAK_RATE = 2e-3
WARM_UP_STEPS = 50
SHORTEST_TEXT = 200


def licences() -> Iterator[str]:
    """Licence texts of this machine, in a fixed order."""
    if LICENCES.is_dir():
        yield from (path.read_text(encoding="utf-8", errors="ignore") for path in sorted(LICENCES.iterdir()))
    for distribution in sorted(importlib.metadata.distributions(), key=lambda found: found.name or ""):
        for file in distribution.files or ():
            if file.name.upper().startswith(("LICENSE", "LICENCE", "COPYING")):
                path = Path(str(file.locate()))
                if path.is_file():
                    yield path.read_text(encoding="utf-8", errors="ignore")


def docstrings() -> Iterator[str]:
    """Docstrings of Python's own library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="ignore"))):
            if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
                yield ast.get_docstring(node) or ""


def flowing(text: str) -> str:
    """`text` with its paragraphs as single lines: hard line breaks and runs of blanks teach a small model only blanks."""
    paragraphs = (" ".join(paragraph.split()) for paragraph in re.split(r"\n\s*\n", text))
    return "\n".join(paragraph for paragraph in paragraphs if paragraph)


def corpus() -> torch.Tensor:
    """The text as bytes, `[byte_count]`; a text that several packages bring comes once."""
    texts = dict.fromkeys(flowing(text) for text in [*licences(), *docstrings()])
    joined = "\n\n".join(text for text in texts if len(text) >= SHORTEST_TEXT)
    return torch.tensor(list(joined.encode("ascii", "ignore")))


def rate(step: int, steps: int) -> float:
    """Learning rate: a short rise, then half a cosine down to a tenth."""
    rise = min(1.0, (step + 1) / WARM_UP_STEPS)
    return PEAK_RATE * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def train(model: PreTrainedModel, text: torch.Tensor, steps: int) -> None:
    """Next-byte prediction on random stretches of `text`; prints the loss now and then."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=PEAK_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    started = time.monotonic()
    model.train()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        starts = torch.randint(0, len(text) - BATCH_TOKENS, (BATCH_ROWS, 1))
        rows = text[starts + torch.arange(BATCH_TOKENS + 1)]
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step} of {steps}: loss {loss.item():.3f}, {time.monotonic() - started:.0f} s",
                flush=True,
            )
    model.eval()  # type: ignore[no-untyped-call]  # transformers


@torch.no_grad()
def sample(model: PreTrainedModel, prompt: str) -> str:
    """What the model writes after `prompt`."""
    tokens = torch.tensor([list(prompt.encode("ascii"))])
    written = model.generate(tokens, max_new_tokens=100, do_sample=False)  # type: ignore[operator]  # transformers
    return bytes(written[0].tolist()).decode("ascii")


def main() -> int:
    """Train, save and show one model."""
    parser = argparse.ArgumentParser(description="Train one of the demo's two small language models.")
    parser.add_argument("name", choices=sorted(path.name for path in TRAINED.iterdir() if path.is_dir()))
    parser.add_argument("--steps", type=int, default=2500, help="optimizer steps (default: 2500)")
    parser.add_argument(
        "--output", type=Path, help="folder for the weights (default: where the demo loads them)"
    )
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be 1 or more")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TRAINED / arguments.name)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]  # transformers
        config, dtype=torch.float32, attn_implementation="eager"
    )
    text = corpus()
    print(f"{arguments.name}: {model.num_parameters()} parameters, {len(text)} bytes of text")
    train(model, text, arguments.steps)
    for prompt in ("The name of the ", "You may not ", "Return a "):
        print(repr(sample(model, prompt)))
    output = arguments.output or TRAINED / arguments.name
    model.to(torch.bfloat16).save_pretrained(output)
    (output / "model.safetensors").chmod(0o644)  # safetensors writes for its owner alone
    # The demo always writes a fixed number of bytes, greedily.
    (output / "generation_config.json").unlink(missing_ok=True)
    if output.resolve() != (TRAINED / arguments.name).resolve():
        shutil.copyfile(TRAINED / arguments.name / "config.json", output / "config.json")
    print(f"saved to {output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
