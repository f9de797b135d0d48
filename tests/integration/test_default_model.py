"""The default model's conversion: killed, raced, and compared with an independent reader of the same weights."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from pdserve.config import DEFAULT_MODEL
from pdserve.models import smollm2, store

PREPARE = [sys.executable, "-m", "pdserve.models"]
TIMEOUT_S = 120

COMPARE = """
import sys, torch, transformers
converted, source = sys.argv[1], sys.argv[2:]
ours = transformers.AutoModelForCausalLM.from_pretrained(converted)
theirs = transformers.AutoModelForCausalLM.from_pretrained(source[0], gguf_file=source[1])
assert ours.dtype is torch.float32
expected = theirs.state_dict()
assert ours.state_dict().keys() == expected.keys()
assert all(torch.equal(weight, expected[name]) for name, weight in ours.state_dict().items())
tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
other = transformers.AutoTokenizer.from_pretrained(source[0], gguf_file=source[1])
text = "In 2024, it's 1,234.5 km\\n\\n\\tcafé 日本 🙂  <|im_start|>user"
assert tokenizer(text).input_ids == other(text).input_ids
assert tokenizer.decode(tokenizer(text).input_ids) == text
assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
question = [{"role": "user", "content": "What is the capital of France?"}]
prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
answer = ours.generate(**prompt, max_new_tokens=20, do_sample=False)[0, prompt.input_ids.shape[1]:]
print(tokenizer.decode(answer))
"""


@dataclass(frozen=True, slots=True)
class Conversion:
    """What was seen while the default model was made ready in an empty home."""

    folder: Path
    visible_after_kill: list[str]
    hidden_after_kill: list[str]
    printed: list[str]
    inodes: set[int]


@pytest.fixture(scope="module")
def conversion(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conversion]:
    """Kill one conversion half-way, then let two processes ask at once."""
    home = tmp_path_factory.mktemp("home")
    models = home / "models"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PDSERVE_HOME", str(home))
        with subprocess.Popen(PREPARE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
            _wait_for_tokenizer(models)
            killed.kill()
        assert killed.returncode == -signal.SIGKILL
        after_kill = [path.name for path in models.iterdir()]
        both = [subprocess.Popen(PREPARE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) for _ in range(2)]
        printed = [process.communicate(timeout=TIMEOUT_S)[0].strip() for process in both]
    folder = Path(printed[0])
    yield Conversion(
        folder=folder,
        visible_after_kill=[name for name in after_kill if not name.startswith(".")],
        hidden_after_kill=[name for name in after_kill if name.endswith(".partial")],
        printed=printed,
        inodes={path.stat().st_ino for path in models.iterdir() if path.is_dir()},
    )


def _wait_for_tokenizer(models: Path) -> None:
    """Return once a conversion has written its small files and works on the weights."""
    give_up_at = time.monotonic() + TIMEOUT_S
    while not list(models.glob(".*.partial/tokenizer.json")):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_killed_conversion_leaves_nothing_half_made(conversion: Conversion) -> None:
    """After SIGKILL in mid-conversion no model folder is there, and its hidden rest is gone once the next one is done."""
    assert conversion.visible_after_kill == []
    assert len(conversion.hidden_after_kill) == 1
    assert list(conversion.folder.parent.glob("*.partial")) == []


def test_two_at_once_share_one_conversion(conversion: Conversion) -> None:
    """Both name the same folder, and it is whole."""
    assert conversion.printed == [str(conversion.folder)] * 2
    assert conversion.folder.name.startswith(f"{DEFAULT_MODEL}-")
    assert store.is_whole(conversion.folder)
    assert len(conversion.inodes) == 1


def test_folder_holds_what_an_engine_needs(conversion: Conversion) -> None:
    """Architecture, tied embeddings, stop token and chat template are where vLLM looks for them."""
    config = json.loads((conversion.folder / "config.json").read_text(encoding="utf-8"))
    assert (config["architectures"], config["tie_word_embeddings"]) == (["LlamaForCausalLM"], True)
    assert json.loads((conversion.folder / "generation_config.json").read_text(encoding="utf-8"))["eos_token_id"] == 2
    assert "<|im_start|>" in json.loads((conversion.folder / "tokenizer_config.json").read_text(encoding="utf-8"))["chat_template"]


def test_converted_model_equals_what_transformers_reads_and_answers(conversion: Conversion) -> None:
    """Every weight is bit for bit that of transformers' own reader, the tokenizers agree, and a question gets its answer."""
    source = smollm2.source()
    command = [sys.executable, "-W", "ignore", "-c", COMPARE, str(conversion.folder), str(source.parent), source.name]
    compared = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert compared.returncode == 0, compared.stderr
    assert "Paris" in compared.stdout
