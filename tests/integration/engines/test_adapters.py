"""LoRA adapters, merged when a model is loaded or chosen by requests: outputs, and adapters that do not fit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tests.small_models import text_model
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification

import headrace
from headrace.engines.generation.causal_lm import ARITHMETIC
from headrace.errors import ConfigError, JobError

TEXTS = [{"id": str(number), "text": f"{number}+{number}="} for number in range(4)]
RANK, ALPHA = 2, 8


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "generate": ARITHMETIC,
        "embed": text_model(root / "encoder", head=False),
        "classify": text_model(root / "classifier"),
    }


LOADERS: dict[str, Any] = {
    "generate": AutoModelForCausalLM,
    "embed": AutoModel,
    "classify": AutoModelForSequenceClassification,
}
LAYERS = {
    "generate": ["model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"],
    "embed": ["encoder.layer.0.attention.self.query", "encoder.layer.1.output.dense"],
    "classify": ["bert.encoder.layer.0.attention.self.query"],
}


def adapter(folder: Path, weights: Mapping[str, torch.Tensor], **config: Any) -> Path:
    """An adapter as PEFT saves it."""
    folder.mkdir()
    given = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "base_model_name_or_path": "the-base", **config}
    (folder / "adapter_config.json").write_text(json.dumps(given))
    save_file(
        {f"base_model.model.{name}": one.contiguous() for name, one in weights.items()},
        folder / "adapter_model.safetensors",
    )
    return folder


def halves(module: torch.nn.Module, layers: list[str], rank: int = RANK) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    torch.manual_seed(5)
    for layer in layers:
        rows, columns = module.get_parameter(f"{layer}.weight").shape
        found[f"{layer}.lora_A.weight"] = torch.randn(rank, columns)
        found[f"{layer}.lora_B.weight"] = torch.randn(rows, rank)
    return found


def run(task: str, model: Path, **settings: Any) -> list[Any]:
    given = {"max_tokens": 6} if task == "generate" else {}
    rows = headrace.run(
        sink="list", task=task, model=str(model), dtype="float32", progress=False,
        **{"source": TEXTS, **given, **settings},
    )  # fmt: skip
    return [next(value for name, value in row.items() if name != "id") for row in rows]


@pytest.mark.parametrize("task", ["generate", "embed", "classify"])
def test_the_outputs_are_those_of_the_merged_weights(task: str, models: dict[str, Path], tmp_path: Path) -> None:
    module = LOADERS[task].from_pretrained(models[task], dtype=torch.float32)
    weights = halves(module, LAYERS[task])
    whole = {"classifier.weight": torch.randn_like(module.classifier.weight)} if task == "classify" else {}
    heads = {"modules_to_save": ["classifier", "score"]} if whole else {}
    if task == "embed":  # attention over large changes would make much of the last digits
        weights = {name: one / 3 for name, one in weights.items()}
    folder = adapter(tmp_path / "adapter", {**weights, **whole}, use_rslora=task == "embed", **heads)
    for layer in LAYERS[task]:
        scale = ALPHA / RANK ** (0.5 if task == "embed" else 1)
        change = weights[f"{layer}.lora_B.weight"] @ weights[f"{layer}.lora_A.weight"] * scale
        module.get_parameter(f"{layer}.weight").data += change
    for name, one in whole.items():
        module.get_parameter(name).data.copy_(one)
    merged = tmp_path / "merged"
    for file in models[task].iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            (merged / file.name).parent.mkdir(exist_ok=True)
            (merged / file.name).write_bytes(file.read_bytes())
    module.save_pretrained(merged)
    found, expected = run(task, models[task], adapter=str(folder)), run(task, merged)
    if task == "embed":
        np.testing.assert_allclose(np.array(found), np.array(expected), atol=1e-5)
        assert np.abs(np.array(found) - np.array(run(task, models[task]))).max() > 0.01
    elif task == "classify":
        assert [one["label"] for one in found] == [one["label"] for one in expected]
        np.testing.assert_allclose([one["score"] for one in found], [one["score"] for one in expected], atol=1e-5)
    else:
        assert found == expected
    assert str(found) != str(run(task, models[task]))


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("missing", "adapter_config.json"),
        ("no weights", "adapter_model.safetensors"),
        ("kind", "IA3"),
        ("dora", "use_dora"),
        ("layer", "which the model does not have: use it with the model that it was made for, the-base"),
        ("shape", "32x32"),
        ("rank", "ranks 2 and 2"),
        ("half", "no lora_B"),
        ("nan", r"base_model\.model\..*query\.lora_B\.weight in .*adapter_model\.safetensors holds NaN"),
        ("saved", "modules_to_save 'pooler', and adapter_model.safetensors has no weights of pooler"),
        ("saved alone", "modules_to_save 'absent', and"),
        ("bias", "bias 'lora_only', and adapter_model.safetensors has no bias"),
        ("biases", "bias 'all', and adapter_model.safetensors has no bias"),
        ("alpha", "adapter_config.json has lora_alpha 'x' for"),
        ("no rank", "adapter_config.json has r None for"),
        ("pattern", "adapter_config.json has rank_pattern 'x' for"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused(
    broken: str, words: str, models: dict[str, Path], tmp_path: Path
) -> None:
    layer = LAYERS["embed"][0]
    weights = {f"{layer}.lora_A.weight": torch.ones(RANK, 32), f"{layer}.lora_B.weight": torch.ones(32, RANK)}
    configs: dict[str, dict[str, Any]] = {
        "kind": {"peft_type": "IA3"},
        "dora": {"use_dora": True},
        "rank": {"r": 4},
        "saved": {"modules_to_save": ["pooler", "absent"]},
        "saved alone": {"modules_to_save": ["absent"]},
        "bias": {"bias": "lora_only"},
        "biases": {"bias": "all"},
        "alpha": {"lora_alpha": "x"},
        "no rank": {"r": None},
        "pattern": {"rank_pattern": "x"},
    }
    config = configs.get(broken, {})
    if broken == "layer":
        weights = {name.replace("query", "q_proj"): one for name, one in weights.items()}
    elif broken == "shape":
        weights[f"{layer}.lora_A.weight"] = torch.ones(RANK, 48)
    elif broken == "nan":
        weights[f"{layer}.lora_B.weight"][0, 0] = torch.nan
    elif broken == "half":
        del weights[f"{layer}.lora_B.weight"]
    folder = tmp_path / "adapter"
    if broken != "missing":
        adapter(folder, weights, **config)
    if broken == "no weights":
        (folder / "adapter_model.safetensors").unlink()
    with pytest.raises((ConfigError, JobError), match=words) as refused:
        run("embed", models["embed"], adapter=str(folder))
    assert "\n" not in str(refused.value)


def test_an_output_belongs_to_its_adapter(models: dict[str, Path], tmp_path: Path) -> None:
    module = AutoModel.from_pretrained(models["embed"])
    weights = halves(module, LAYERS["embed"])
    first, second = adapter(tmp_path / "a", weights), adapter(tmp_path / "b", weights, lora_alpha=1)
    settings: dict[str, Any] = {"task": "embed", "model": str(models["embed"]), "progress": False}
    headrace.run(source=TEXTS, sink=tmp_path / "out.jsonl", adapter=str(first), **settings)
    with pytest.raises(JobError, match="adapter"):
        headrace.run(source=TEXTS, sink=tmp_path / "out.jsonl", adapter=str(second), **settings)


def test_records_name_their_adapter(tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(ARITHMETIC, dtype=torch.float32)
    folder = adapter(tmp_path / "adapter", halves(module, LAYERS["generate"]))
    steps: list[dict[str, Any]] = [
        {"name": name, "task": "generate", "engine_options": {"max_tokens": 6, "dtype": "float32", **more}}
        for name, more in (("plain", {}), ("tuned", {"adapter": str(folder)}))
    ]
    rows = [{**row, "which": ("plain", "tuned")[number % 2]} for number, row in enumerate(TEXTS)]
    headrace.run(source=rows, sink=tmp_path / "out.jsonl", steps=steps, model_column="which", progress=False)
    found = [json.loads(line)["generation"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    alone = [run("generate", ARITHMETIC), run("generate", ARITHMETIC, adapter=str(folder))]
    assert found == [alone[number % 2][number] for number in range(len(TEXTS))]


def test_each_request_chooses_an_adapter_by_name(tmp_path: Path) -> None:
    """Beside each other in the same steps, with one prompt for all, whose pages no two of them share."""
    module = AutoModelForCausalLM.from_pretrained(ARITHMETIC, dtype=torch.float32)
    folders = {
        "one": adapter(tmp_path / "one", halves(module, LAYERS["generate"])),
        "two": adapter(tmp_path / "two", halves(module, LAYERS["generate"][:1], rank=3), r=3),
    }
    prompt = "1+2+3+4+5+6+7+8+9=" * 3
    alone = {
        name: run(
            "generate", ARITHMETIC, source=[{"text": prompt}], **({"adapter": str(folders[name])} if name else {})
        )
        for name in ("", "one", "two")
    }
    assert len({str(answers) for answers in alone.values()}) == 3
    chosen = ["", "one", "two", "one", ""]
    rows = [{"text": {"prompt": prompt, **({"adapter": name} if name else {})}} for name in chosen]
    given = {"adapters": {name: str(folder) for name, folder in folders.items()}, "engine": "torch"}
    for _ in range(2):
        assert run("generate", ARITHMETIC, source=rows, **given) == [alone[name][0] for name in chosen]
    rows[0]["text"] = {"prompt": "1", "adapter": "three"}
    report = headrace.run(rows, sink=tmp_path / "out.jsonl", task="generate", max_error_rate=1, progress=False, **given)
    assert report.failures == {"RecordError": 1}
    assert "adapter is 'three': the engine has one, two" in (tmp_path / "out.errors.jsonl").read_text()


UNKNOWN = "there is no model 'suport'; the model and its adapters are 'arithmetic' and 'support'; did you mean support?"


def test_a_request_for_a_model_that_is_not_there_is_refused_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a job, in a batch file and in a call; without adapters, a file for another model is answered as it is."""
    module = AutoModelForCausalLM.from_pretrained(ARITHMETIC, dtype=torch.float32)
    given = {"adapters": {"support": str(adapter(tmp_path / "one", halves(module, LAYERS["generate"])))}}
    names = ["support", "arithmetic", "tgi", None, "suport"]
    bodies = [{"prompt": "1+2=", **({} if name is None else {"model": name})} for name in names]
    requests = [
        {"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}
        for number, body in enumerate(bodies)
    ]
    (tmp_path / "batch.jsonl").write_text("\n".join(map(json.dumps, requests)))
    settings: dict[str, Any] = {"task": "generate", "max_tokens": 6, "max_error_rate": 1, "progress": False}
    for source in (tmp_path / "batch.jsonl", [{"text": body} for body in bodies]):
        out = tmp_path / type(source).__name__
        report = headrace.run(source, sink=out.with_suffix(".jsonl"), **settings, **given)
        assert (report.records, report.failures) == (5, {"RecordError": 1})
        assert UNKNOWN in out.with_suffix(".errors.jsonl").read_text()
        assert headrace.run(source, sink=tmp_path / "plain.jsonl", overwrite=True, **settings).failures == {}
    with headrace.load("generate", max_tokens=6, **given) as model:
        *answers, refused = model(bodies, return_exceptions=True)
        assert str(refused) == UNKNOWN
        assert len({answer["text"] for answer in answers[1:]}) == 1 != len({answer["text"] for answer in answers})
        assert model.run(source, sink="list", max_error_rate=1, progress=False)[:4] == [
            {"id": number, "generation": answer} for number, answer in enumerate(answers)
        ]
        model.run([{"text": "1+2=", "model": "support"}], sink="list", progress=False)
    assert "the column 'model' is not used" in caplog.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adapter": "a"}, "do not go together"),
        ({"engine": "static"}, "adapters"),
    ],
)
def test_adapters_by_name_are_refused_where_they_cannot_be(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    module = AutoModelForCausalLM.from_pretrained(ARITHMETIC, dtype=torch.float32)
    folder = adapter(tmp_path / "one", halves(module, LAYERS["generate"]))
    with pytest.raises(ConfigError, match=words):
        headrace.load("generate", adapters={"one": str(folder)}, **options)
