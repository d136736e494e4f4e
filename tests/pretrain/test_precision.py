import pytest
import torch

from tessera.pretrain.config import settings_model
from tessera.pretrain.precision import with_precision


@pytest.mark.parametrize(
    ("variant", "instructions", "launcher", "expected"),
    [
        ("vit_tiny", True, "no", "bf16"),
        ("vit_tiny", False, "no", "fp32"),
        ("vit_micro", True, "no", "fp32"),  # the conversions would take as long as they save
        ("swin_tiny", True, "no", "bf16"),
        ("vit_micro", False, "bf16", "bf16"),  # the user's choice
    ],
)
def test_automatic_precision_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, variant: str, instructions: bool, launcher: str, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instructions)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", launcher)
    config = settings_model(variant)()
    assert with_precision(config).precision == expected
