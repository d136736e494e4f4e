# %% [markdown]
# # Tessera from Python
#
# Pretrain on the embedded digits, from the first batch to an evaluated encoder. This takes 97 s on two CPU cores (Intel
# Xeon, torch 2.15). Editors such as VS Code and PyCharm show the cells of this file as a notebook, and
# `python docs/example.py` runs them all. For your own images, give `data="photos/train"`.

# %%
import sys

import tessera
from tessera.data.demo import demo_shards

STEPS = int(sys.argv[1]) if len(sys.argv) > 1 else 450
train, val = demo_shards()

# %% [markdown]
# The next cell prints the shapes of the crops in one training batch.

# %%
batch = next(iter(tessera.training_batches(method="lejepa", steps=STEPS)))
print([tuple(view.images.shape) for view in batch.views])

# %% [markdown]
# Pretrain without labels. Every setting of the command line is an argument: `optim={"lr": 1e-3}` is `--optim.lr 1e-3`.

# %%
run = tessera.pretrain(method="lejepa", steps=STEPS, output="runs/example", overwrite=True)
print(run.path, run.metrics[-1]["knn_top1"])

# %% [markdown]
# The encoder as a torch module, and the features of all held-out images.

# %%
encoder = tessera.load(run.path)
features = tessera.embed(encoder, val)
print(features.features.shape, features.labels[:10])

# %% [markdown]
# Accuracies on frozen features.

# %%
print(tessera.knn(run.path, train=train, val=val)["top1"])
print(tessera.linear_probe(run.path, train=train, val=val, augment=False, batch_norm=True)["top1"])
