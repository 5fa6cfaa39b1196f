"""A GAN: two networks and two optimizers in one function, which `ampkit.graphed` captures as a whole.

    python examples/gan.py      on a GPU the function becomes a graph; on a CPU it is emulated, and nothing is faster

The generator learns eight clusters on a circle of radius 2.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import ampkit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GRAPH = "auto" if DEVICE == "cuda" else "emulate"
BATCH = 256


def mlp(first: int, last: int) -> nn.Sequential:
    layers = nn.Linear(first, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, last)
    return nn.Sequential(*layers).to(DEVICE)


def real_points() -> Tensor:
    """Return points near eight places on a circle."""
    angle = torch.randint(8, (BATCH,), device=DEVICE) * (math.pi / 4)
    return 2 * torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(BATCH, 2, device=DEVICE)


def main(graph: str = GRAPH, steps: int = 500) -> list[float]:
    """Train; print and return how far the generated points are from the circle, on average, in each tenth."""
    torch.manual_seed(0)
    generator, discriminator = mlp(8, 2), mlp(2, 1)
    of_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)
    of_discriminator = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)

    @ampkit.graphed(modules=(generator, discriminator), optimizers=(of_generator, of_discriminator), graph=graph)
    def train_step(real: Tensor) -> dict[str, Tensor]:
        fake = generator(torch.randn(BATCH, 8, device=DEVICE))  # each replay draws other numbers
        of_real, of_fake = discriminator(real), discriminator(fake.detach())
        loss_d = F.softplus(-of_real).mean() + F.softplus(of_fake).mean()
        of_discriminator.zero_grad()
        loss_d.backward()
        of_discriminator.step()

        loss_g = F.softplus(-discriminator(fake)).mean()
        of_generator.zero_grad()
        loss_g.backward()
        of_generator.step()
        return {"discriminator": loss_d, "generator": loss_g, "off": (fake.norm(dim=1) - 2).abs().mean()}

    distances = []
    for i in range(steps):
        out = train_step(real_points())
        if (i + 1) % (steps // 10) == 0:
            distances.append(out["off"].item())
            losses = f"losses {out['discriminator'].item():.3f} and {out['generator'].item():.3f}"
            print(f"step {i + 1}: {distances[-1]:.3f} off the circle, {losses}")
    print(train_step.report())
    return distances


if __name__ == "__main__":
    main()
