# A server on an NVIDIA GPU: weights at /opt/ml/model, port 8080, no network needed once it is built.
#
#   docker build -t penstock .
#   docker run --gpus all -p 8080:8080 -v ~/models/Qwen3.5-4B:/opt/ml/model:ro penstock serve
#
# Every flag of `penstock serve` may follow `serve`, or be a PENSTOCK_ variable: -e PENSTOCK_MAX_ROWS=64.
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# Triton and the kernels of the CPU need a compiler at run time. CUDA's libraries come with torch.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends g++ python3 python3-dev python3-venv \
 && rm -rf /var/lib/apt/lists/*

ENV PATH=/opt/penstock/bin:$PATH
RUN python3 -m venv /opt/penstock \
 && pip install --no-cache-dir torch==2.11.0

COPY pyproject.toml README.md LICENSE /opt/source/
COPY penstock /opt/source/penstock
# Compiled kernels are kept in the cache: a volume spares the next container the first start's minute.
RUN pip install --no-cache-dir /opt/source \
 && useradd --create-home --uid 10001 penstock \
 && mkdir -p /var/cache/penstock /opt/ml/model \
 && chown penstock /var/cache/penstock
USER 10001
WORKDIR /home/penstock

ENV PENSTOCK_MODEL=/opt/ml/model \
    PENSTOCK_HOST=0.0.0.0 \
    PENSTOCK_PORT=8080 \
    PENSTOCK_ENABLE_THINKING=0 \
    PENSTOCK_SERVE_PROFILE=latency \
    XDG_CACHE_HOME=/var/cache/penstock \
    TRITON_CACHE_DIR=/var/cache/penstock/triton \
    HF_HUB_OFFLINE=1

EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=3s --start-period=5m CMD \
    ["python3", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8080/ping')"]
ENTRYPOINT ["penstock"]
CMD ["serve"]
