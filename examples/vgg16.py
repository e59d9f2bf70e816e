"""VGG-16 from torchvision, plain SGD with momentum: half of its memory is weights, which no recompute can save."""

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
    model = torchvision.models.vgg16(num_classes=1000).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    batch = (torch.randn(12, 3, 224, 224), torch.randint(1000, (12,)))
    return tensile.Workload(model, optimizer, train_step, batch)
