# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM FP8 KV-cache fork for Gaudi
#
# Two images: `cpu` (the default) and `gaudi`. How they are built and run, and what was
# verified: docs/images.md. tools/image.py builds one, runs it and asks it a question.
#
# pip's configuration of the host (an index, a proxy, credentials) comes in as a secret,
# which no layer keeps: --secret id=pip,src=$HOME/.config/pip/pip.conf

ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm
ARG GAUDI_IMAGE=vault.habana.ai/gaudi-docker/1.24.1/ubuntu24.04/habanalabs/pytorch-installer-2.11.0:latest

# --- What all builds need -----------------------------------------------------------
FROM ${PYTHON_IMAGE} AS source
WORKDIR /src
RUN python3 -m venv /opt/vllm
COPY LICENSE NOTICE pyproject.toml upstream.toml ./
COPY tools tools
COPY patches patches
COPY vllm vllm
# A URL or a mounted file with the upstream wheel, where pip shall not download it.
ARG VLLM_PRECOMPILED_WHEEL_LOCATION

# --- cpu: an environment with the wheel and what it requires ------------------------
FROM source AS cpu-environment
# torch on the Python package index is the CUDA build of several GB. xgrammar asks for
# triton, 1 GB that only a GPU uses; vLLM and xgrammar do without it on CPU.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    /opt/vllm/bin/pip install --no-cache-dir \
        ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} . \
    && /opt/vllm/bin/pip uninstall --yes triton pip \
    && rm -r build

# --- gaudi: two wheels, vLLM without compiled files and the patched worker ----------
FROM source AS gaudi-wheels
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git \
    && rm -r /var/lib/apt/lists/*
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    VLLM_TARGET_DEVICE=gaudi /opt/vllm/bin/pip wheel --no-cache-dir --no-deps \
        --wheel-dir /wheels . \
    && /opt/vllm/bin/pip install --no-cache-dir packaging \
    && rm -r build
# Another place with the same commit: a mirror, or a mounted clone.
ARG VLLM_GAUDI_REPOSITORY
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    set -eu; \
    pin() { python3 -c "import tomllib; print(tomllib.load(open('upstream.toml', 'rb'))['vllm-gaudi']['$1'])"; }; \
    git init --quiet /worker; \
    git -C /worker fetch --quiet --depth 1 \
        "${VLLM_GAUDI_REPOSITORY:-$(pin repository)}" "$(pin commit)"; \
    git -C /worker checkout --quiet FETCH_HEAD; \
    /opt/vllm/bin/python tools/patches.py worker /worker /patched; \
    cp -r /patched/vllm_gaudi /worker/; \
    /opt/vllm/bin/pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /worker

# --- The image for Gaudi ------------------------------------------------------------
FROM ${GAUDI_IMAGE} AS gaudi
ARG GAUDI_IMAGE
ARG REVISION=unknown
ARG INC=neural-compressor-pt==3.10
# The base image's torch is the HPU build: nothing may replace it.
RUN --mount=type=secret,id=pip,target=/etc/pip.conf \
    --mount=type=bind,from=gaudi-wheels,source=/wheels,target=/wheels \
    set -eu; \
    python3 -m pip list --format=freeze | grep -E '^(torch|habana)' > /tmp/keep.txt; \
    python3 -m pip install --no-cache-dir --constraint /tmp/keep.txt /wheels/*.whl "$INC"; \
    rm /tmp/keep.txt
COPY LICENSE NOTICE /licenses/
COPY examples/tiny-deepseek-v2-fp8 /models/tiny-deepseek-v2-fp8
WORKDIR /models
ENV OMPI_MCA_btl_vader_single_copy_mechanism=none \
    VLLM_NO_USAGE_STATS=1
LABEL org.opencontainers.image.title="vLLM with a calibrated FP8 KV cache, for Gaudi" \
      org.opencontainers.image.description="vLLM and vllm-gaudi with --kv-cache-dtype fp8_inc" \
      org.opencontainers.image.version="0.28.0+gaudi.fp8inc.1" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${GAUDI_IMAGE}"
EXPOSE 8000
# Warm-up of all buckets takes many minutes.
HEALTHCHECK --interval=30s --timeout=5s --start-period=60m --retries=3 \
    CMD ["python3", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["python3", "-m", "vllm.entrypoints.openai.api_server", \
            "--host", "0.0.0.0", "--port", "8000", \
            "--model", "tiny-deepseek-v2-fp8", "--kv-cache-dtype", "fp8_inc"]

# --- The image for CPUs -------------------------------------------------------------
FROM ${PYTHON_IMAGE} AS cpu
ARG PYTHON_IMAGE
ARG REVISION=unknown
# libnuma: vLLM's compiled files link to it.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libnuma1 \
    && rm -r /var/lib/apt/lists/* \
    && useradd --uid 10001 --no-create-home --home-dir /tmp vllm
COPY --from=cpu-environment /opt/vllm /opt/vllm
COPY LICENSE NOTICE /licenses/
COPY examples/tiny-deepseek-v2-fp8 /models/tiny-deepseek-v2-fp8
WORKDIR /models
# All that is written lies under /tmp: the root file system may be read-only. USER and
# LOGNAME, so that another uid than vllm's, without an entry in /etc/passwd, works too.
ENV PATH=/opt/vllm/bin:$PATH \
    HOME=/tmp \
    USER=vllm \
    LOGNAME=vllm \
    XDG_CACHE_HOME=/tmp/cache \
    VLLM_CACHE_ROOT=/tmp/cache/vllm \
    HF_HOME=/tmp/cache/huggingface \
    TORCHINDUCTOR_CACHE_DIR=/tmp/cache/inductor \
    VLLM_CPU_KVCACHE_SPACE=1 \
    VLLM_NO_USAGE_STATS=1
LABEL org.opencontainers.image.title="vLLM with a calibrated FP8 KV cache, on CPU with Gaudi's numbers" \
      org.opencontainers.image.description="vLLM with --kv-cache-dtype fp8_inc for CPUs, and a small model to try it" \
      org.opencontainers.image.version="0.28.0+cpu.fp8inc.1" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
USER 10001:10001
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=3m --retries=3 \
    CMD ["/opt/vllm/bin/python", "-c", "import http.client as h; c = h.HTTPConnection('127.0.0.1', 8000, timeout=4); c.request('GET', '/health'); raise SystemExit(c.getresponse().status != 200)"]
# In vLLM's command line the last of two equal flags wins: `docker run IMAGE --model X`
# serves X, and each of these can be changed. torch.compile would need a C++ compiler.
ENTRYPOINT ["/opt/vllm/bin/python", "-m", "vllm.entrypoints.openai.api_server", \
            "--host", "0.0.0.0", "--port", "8000", \
            "--model", "tiny-deepseek-v2-fp8", "--kv-cache-dtype", "fp8_inc", \
            "--enforce-eager"]
