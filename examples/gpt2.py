"""GPT-2 from a config, AdamW, dropout on: `tensile compile examples/gpt2.py --budget 60%`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import tensile

VOCABULARY = 8192


def train_step(model, optimizer, input_ids):
    loss = model(input_ids, labels=input_ids).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def make_batch(seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randint(VOCABULARY, (8, 256), generator=generator),)


def workload() -> tensile.Workload:
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=256, n_head=8, n_positions=256, vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0,
        use_cache=False,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01)
    return tensile.Workload(model, optimizer, train_step, make_batch(0))
