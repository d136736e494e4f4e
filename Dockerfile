# An image with Tessera and CUDA: docker build -t tessera . && docker run --gpus all --ipc host -v "$PWD:/work" tessera pretrain --help
# `--ipc host` gives NCCL the shared memory that it needs. For Apptainer, see apptainer.def.
FROM python:3.12-slim
# A compiler, for `--compile true` and for the operators of DeepSpeed.
RUN apt-get update && apt-get install -y --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*
COPY . /opt/tessera
RUN pip install --no-cache-dir "/opt/tessera[http,s3,gs,parquet,timm,onnx]"
WORKDIR /work
ENTRYPOINT ["tessera"]
