"""Random numbers of encoders: uniform, independent, and a function of seed, step and sample alone."""

import math

import pytest
import torch
import torch.nn.functional as F

from tessera import encoders
from tessera.encoders.errors import EncoderError
from tessera.encoders.images import pack
from tessera.encoders.randomness import drop_path_scales, next_keys, random_keys, token_noise
from tests.encoders import helpers
from tests.encoders.helpers import MICRO

CPU = torch.device("cpu")
RATES = (0.0, 0.1, 0.25, 0.5, 0.9)


def keys(samples: int, *, seed: int = 0, step: int = 0, images: int | None = None) -> torch.Tensor:
    with random_keys(seed, step, torch.arange(samples)):
        found = next_keys(images or samples)
    assert found is not None
    return found


def chi_square(table: torch.Tensor) -> float:
    """Statistic of independence of a table of counts, in standard deviations of its distribution."""
    expected = table.sum(0) * table.sum(1)[:, None] / table.sum()
    degrees = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(((table - expected).square() / expected).sum() - degrees) / math.sqrt(2 * degrees)


def counts(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    return torch.bincount(2 * first.flatten().long() + second.flatten().long(), minlength=4).view(2, 2).double()


def test_branches_are_dropped_at_their_rate():
    count = 200_000
    scales = drop_path_scales(keys(count), RATES, CPU)
    assert scales.shape == (5, 2, count)
    for rate, branches in zip(RATES, scales, strict=True):
        assert set(branches.unique().tolist()) <= {0.0, torch.tensor(1 / (1 - rate)).item()}
        dropped = (branches == 0).double().mean(1)
        assert (dropped - rate).abs().max() <= 4.5 * math.sqrt(rate * (1 - rate) / count)


def test_samples_crops_blocks_branches_steps_and_seeds_are_independent():
    count, rates = 100_000, (0.5,) * 12
    first = drop_path_scales(keys(count), rates, CPU) > 0
    flat = first.flatten(0, 1)
    pairs = [(flat[i], flat[j]) for i in range(24) for j in range(i)]
    pairs += [(first[:, :, 1:], first[:, :, :-1]), (first[:, :, 2:], first[:, :, :-2])]
    for other in ({"step": 1}, {"step": 256}, {"seed": 1}, {"seed": 2**32}):
        pairs.append((first, drop_path_scales(keys(count, **other), rates, CPU) > 0))
    crops = drop_path_scales(keys(count, images=2 * count), rates, CPU) > 0
    pairs.append((crops[..., :count], crops[..., count:]))
    with random_keys(0, 0, torch.arange(count)):
        calls = [drop_path_scales(next_keys(count), rates, CPU) > 0 for _ in range(2)]
    pairs.append((calls[0], calls[1]))
    assert torch.equal(calls[0], first)
    assert max(chi_square(counts(*pair)) for pair in pairs) < 12  # one degree of freedom: 4.2 standard deviations
    numbers = sum(bit.long() << i for i, bit in enumerate(flat[:8]))  # all patterns of eight branches
    expected = count / 256
    statistic = float(((torch.bincount(numbers, minlength=256) - expected).square() / expected).sum())
    assert abs(statistic - 255) < 4.5 * math.sqrt(2 * 255)


def test_token_noise_is_uniform():
    image_ids = torch.arange(1000).repeat_interleave(200)
    noise = token_noise(keys(1000), image_ids, torch.arange(200).repeat(1000))
    found = torch.histc(noise, 100, 0, 1)
    assert abs(float(((found - 2000).square() / 2000).sum()) - 99) < 4.5 * math.sqrt(2 * 99)
    assert noise.min() >= 0
    assert noise.max() < 1


def trained(variant: str, **settings) -> encoders.Encoder:
    torch.manual_seed(0)
    return encoders.build(variant, drop_path=0.5, **settings).train()


def images_of(count: int, seed: int = 0) -> torch.Tensor:
    return helpers.images_of(count, 3, 16, 16, seed=seed)


def run(encoder, images, samples, *, step: int = 3) -> torch.Tensor:
    with random_keys(7, step, samples):
        return encoder(images).pooled


@pytest.mark.parametrize("variant", MICRO)
def test_a_batch_in_two_halves_gives_what_it_gives_in_one(variant):
    encoder, images, samples = trained(variant), images_of(8), torch.arange(8)
    whole = run(encoder, images, samples)
    halves = torch.cat([run(encoder, images[part], samples[part]) for part in (slice(0, 4), slice(4, 8))])
    torch.testing.assert_close(halves, whole, rtol=1e-5, atol=1e-6)
    others = run(encoder, images[4:], samples[:4])  # another place draws another way
    assert not torch.allclose(others, whole[4:], rtol=1e-3, atol=1e-4)
    assert not torch.allclose(run(encoder, images, samples, step=4), whole, rtol=1e-3, atol=1e-4)
    assert torch.equal(run(encoder, images, samples), whole)


def test_crops_of_a_sample_are_split_with_it():
    """Crop-major crops of four samples, in one process and in two; and packed images."""
    encoder, images, samples = trained("navit_micro", token_drop=0.3), images_of(12), torch.arange(4)
    whole = run(encoder, images, samples).unflatten(0, (3, 4))
    packed = run(encoder, pack([images], 4), samples).unflatten(0, (3, 4))
    torch.testing.assert_close(packed, whole, rtol=1e-5, atol=1e-6)
    crops = images.unflatten(0, (3, 4))
    parts = (slice(2), slice(2, 4))
    halves = [run(encoder, crops[:, part].flatten(0, 1), samples[part]).unflatten(0, (3, 2)) for part in parts]
    torch.testing.assert_close(torch.cat(halves, 1), whole, rtol=1e-5, atol=1e-6)
    with pytest.raises(EncoderError, match=r"12 images\. The number of images must be a multiple of 5,"):
        run(encoder, images, torch.arange(5))


@pytest.mark.parametrize("variant", MICRO)
def test_recomputed_activations_draw_the_same(variant):
    plain, recomputing = (trained(variant, checkpoint_activations=on) for on in (False, True))
    for encoder in (plain, recomputing):
        with random_keys(0, 0, torch.arange(4)):
            views = [encoder(images_of(4, seed)).pooled for seed in (1, 2)]
        sum(view.square().sum() for view in views).backward()
    for (name, one), (_, other) in zip(plain.named_parameters(), recomputing.named_parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(other.grad, one.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_nothing_is_read_from_the_device_and_compiled_blocks_take_the_factors():
    found = drop_path_scales(keys(8), RATES, torch.device("meta"))  # a tensor without values cannot be read
    assert found.is_meta
    encoder, images, samples = trained("vit_micro"), images_of(4), torch.arange(4)
    expected = [run(encoder, images, samples, step=step) for step in range(3)]
    graphs, made = [], []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in encoder.blocks:
        block.compile(backend=backend, fullgraph=True)
    for step, pooled in enumerate(expected):
        torch.testing.assert_close(run(encoder, images, samples, step=step), pooled)
        made.append(len(graphs))
    assert made[0] == made[-1]  # no graph for a step
    torch.compiler.reset()


def test_random_numbers_of_torch_are_left_alone():
    encoder, images = trained("vit_micro"), images_of(4)
    state = torch.get_rng_state()
    run(encoder, images, torch.arange(4))
    assert torch.equal(torch.get_rng_state(), state)
    assert F.mse_loss(run(encoder.eval(), images, torch.arange(4)), encoder(images).pooled) == 0
