"""Pretrain in a plain PyTorch loop: the method and the batches come from Tessera, and everything else is yours.

python examples/own_loop.py [STEPS]     # embedded digits; for your own images, add "data": "photos/train" to `settings`
"""

import sys

import torch

import tessera
from tessera import encoders
from tessera.data.demo import demo_shards

settings = {"method": "lejepa", "steps": int(sys.argv[1]) if len(sys.argv) > 1 else 300, "batch_size": 64}
method = tessera.methods.build(**settings)
optimizer = torch.optim.AdamW((p for p in method.parameters() if p.requires_grad), lr=5e-4, weight_decay=0.05)
for step, batch in enumerate(tessera.training_batches(**settings)):
    loss, metrics = method(batch, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    method.after_step(step)
    if step % 50 == 0:
        print(f"step {step}: loss {loss.item():.4f}")

encoders.save(method.trained_encoder(), "encoder.safetensors")
train, val = demo_shards()
print(tessera.knn("encoder.safetensors", train, val)["top1"])
