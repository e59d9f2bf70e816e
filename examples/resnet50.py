"""ResNet-50 from torchvision, SGD with momentum: `tensile compile examples/resnet50.py --budget 60%`."""

import torch
import torchvision

import tensile


def train_step(model, optimizer, images, labels):
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def workload() -> tensile.Workload:
    torch.manual_seed(0)
    model = torchvision.models.resnet50(num_classes=1000).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    batch = (torch.randn(16, 3, 128, 128), torch.randint(1000, (16,)))
    return tensile.Workload(model, optimizer, train_step, batch)
