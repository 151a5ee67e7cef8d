"""A small U-Net + a grid CRF separate noisy blobs from their ground. `python examples/unet_crf.py [--quick]`."""

import sys

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, interpolate, nll_loss

import riskfield as rf

FINE, COARSE, HEAD = (nn.Conv2d(*sizes, 3, padding=1) for sizes in ((1, 16), (16, 16), (32, 2)))
CRF = rf.nn.GridCRF(num_classes=2, contrast=True)


def log_marginals(image: Tensor) -> Tensor:
    """One level down and up again, then the CRF: of shape (batch, class, row, column), for images of any size."""
    fine = FINE(image).relu()
    return CRF(HEAD(torch.cat([fine, interpolate(COARSE(avg_pool2d(fine, 2)).relu(), image.shape[2:])], 1)), image)


def drawn_images(number: int, side: int) -> tuple[Tensor, Tensor]:
    """Draw noisy images and their labels."""
    blobs = avg_pool2d(torch.randn(number, 1, side + 8, side + 8), 9, stride=1) > 0
    return blobs + 0.8 * torch.randn(blobs.shape), blobs[:, 0].long()


def main(quick: bool) -> tuple[float, ...]:
    """Train, and return the shares of wrong pixels in new, larger images: of the model and of a threshold."""
    optimiser = torch.optim.Adam(nn.ModuleList([FINE, COARSE, HEAD, CRF]).parameters(), lr=0.01)
    for _ in range(15 if quick else 300):
        optimiser.zero_grad()
        images, labels = drawn_images(8, side=20)
        nll_loss(log_marginals(images), labels).backward()
        optimiser.step()
    images, labels = drawn_images(8, side=32)
    return tuple(float((own != labels).float().mean()) for own in (log_marginals(images).argmax(1), images[:, 0] > 0.5))


if __name__ == "__main__":
    print("wrong pixels: {:.1%}; by a threshold: {:.1%}".format(*main("--quick" in sys.argv)))
