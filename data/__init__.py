"""From shards to batches. Nothing here knows a model: a method's transform says which crops and masks are drawn.

A batch takes this way:
1. `shards` opens the data and reads the image and the label of a sample, `exclude` leaves named samples out, and
   `decoders` and `decode` make pixels.
2. `sampler` says which sample comes at a position of the run, as a function of the seed, without state.
3. `dataset` reads and decodes the samples of a batch; `crops`, `colors` and `masking` draw their parameters.
4. `resample` and `collate` cut the crops into the memory of a batch (`batch`), and `workers`, `batches` and
   `shared_memory` bring it from the loader workers.
5. `augment` applies the colours to the batch on the device, by `pixels`.

`loader` puts 1 to 4 together. `user_code` runs code of the user with random numbers by position. `ordered_shards` feeds
pipelines of webdataset. `make_shards` and `check_shards` are commands, built from `tools`. `demo` writes the digits.
The order of samples is fixed for older runs: change nothing in `sampler` that moves it.
"""
