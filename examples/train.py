"""An ordinary training script that may run under a plan: `python examples/train.py [gpt2.plan.yaml]`."""

import sys

import torch
from gpt2 import make_batch, train_step, workload

import tensile


def main(plan: str | None) -> None:
    job = workload()
    scheduler = torch.optim.lr_scheduler.LinearLR(job.optimizer, start_factor=0.1, total_iters=10)
    if plan is None:
        for number in range(10):
            loss = train_step(job.model, job.optimizer, *make_batch(number))
            scheduler.step()
            print(f"step {number}: loss {loss.item():.6f}")
        return
    with tensile.load(plan, model=job.model, optimizer=job.optimizer, step_fn=train_step) as step:
        for number in range(10):
            loss = step(*make_batch(number))
            scheduler.step()
            print(f"step {number}: loss {loss.item():.6f}")
        print(step.report())


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
