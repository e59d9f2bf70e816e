"""Small training steps of many kinds, each built anew from one seed: what tests and benchmarks run on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import torchvision
import transformers

import tensile

Maker = Callable[[], tensile.Workload]
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "sgd_foreach": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, foreach=True),
    "sgd_fused": lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "adam_fused": lambda p: torch.optim.Adam(p, lr=1e-3, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "adamw_foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
}


def text_step(
    *, clip: float | None = None, zero_first: bool = False, set_to_none: bool = True, bf16: bool = False
) -> Any:
    """A step for models of transformers; the batch is one dictionary of keyword arguments."""

    def step(model, optimizer, batch):  # type: ignore[no-untyped-def]
        if zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(**batch).loss
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        if not zero_first:
            optimizer.zero_grad(set_to_none=set_to_none)
        return loss.detach()

    return step


def image_step(model, optimizer, images, labels):  # type: ignore[no-untyped-def]
    """A step for image classifiers; Inception's auxiliary head counts 0.4."""
    out = model(images)
    if isinstance(out, torch.Tensor):
        loss = F.cross_entropy(out, labels)
    else:
        loss = F.cross_entropy(out[0], labels) + 0.4 * F.cross_entropy(out[1], labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(100, (rows, length))
    return {"input_ids": ids, "labels": ids}


def gpt2(rows: int = 2, length: int = 32, width: int = 32) -> tuple[torch.nn.Module, Any]:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=width, n_head=2, vocab_size=100, n_positions=length, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    return model.train(), ({**tokens(rows, length)},)


def bert() -> tuple[torch.nn.Module, Any]:
    config = transformers.BertConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, vocab_size=100
    )
    mask = torch.ones(4, 32, dtype=torch.long)
    mask[1, 20:] = 0
    return transformers.BertForMaskedLM(config).train(), ({**tokens(4, 32), "attention_mask": mask},)


def llama() -> tuple[torch.nn.Module, Any]:
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64,
        vocab_size=100, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).train(), ({**tokens(4, 32), "attention_mask": torch.ones(4, 32)},)


def t5() -> tuple[torch.nn.Module, Any]:
    config = transformers.T5Config(
        num_layers=2,
        d_model=32,
        d_kv=8,
        d_ff=64,
        num_heads=4,
        vocab_size=100,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config).train(), (tokens(4, 32),)


def vit() -> tuple[torch.nn.Module, Any]:
    config = transformers.ViTConfig(
        num_hidden_layers=2, hidden_size=32, num_attention_heads=2, intermediate_size=64, image_size=32, patch_size=8,
        num_labels=10,
    )  # fmt: skip
    model = transformers.ViTForImageClassification(config).train()
    return model, ({"pixel_values": torch.randn(8, 3, 32, 32), "labels": torch.randint(10, (8,))},)


def images(name: str, rows: int, size: int) -> tuple[torch.nn.Module, Any]:
    options = {"init_weights": False} if name == "inception_v3" else {}
    model = getattr(torchvision.models, name)(num_classes=10, **options).train()
    return model, (torch.randn(rows, 3, size, size), torch.randint(10, (rows,)))


TEXT: dict[str, Callable[[], tuple[torch.nn.Module, Any]]] = {
    "gpt2": gpt2, "bert": bert, "llama": llama, "t5": t5, "vit": vit,
}  # fmt: skip
IMAGES: dict[str, Callable[[], tuple[torch.nn.Module, Any]]] = {
    "vgg16": lambda: images("vgg16", 2, 64),
    "resnet50": lambda: images("resnet50", 4, 96),
    "inception_v3": lambda: images("inception_v3", 2, 299),
    "densenet121": lambda: images("densenet121", 4, 64),
}


def make(model: str, optimizer: str, **options: Any) -> tensile.Workload:
    """The named model under the named optimizer, from seed 0; options shape the text models' step."""
    torch.manual_seed(0)
    module, batch = (TEXT | IMAGES)[model]()
    step = text_step(**options) if model in TEXT else image_step
    return tensile.Workload(
        module, OPTIMIZERS[optimizer](module.parameters()), step, batch, name=f"{model}-{optimizer}"
    )


def perceptron(
    optimizer: str = "adam", *, rows: int = 64, width: int = 64, layers: int = 3, dropout: float = 0.0
) -> tensile.Workload:
    """Linear layers with GELU, the workload most tests use."""
    torch.manual_seed(0)
    parts: list[torch.nn.Module] = []
    for _ in range(layers):
        parts += [torch.nn.Linear(width, width), torch.nn.GELU(), torch.nn.Dropout(dropout)]
    model = torch.nn.Sequential(*parts, torch.nn.Linear(width, 10))
    batch = (torch.randn(rows, width), torch.randint(10, (rows,)))
    return tensile.Workload(model, OPTIMIZERS[optimizer](model.parameters()), image_step, batch)
