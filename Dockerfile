# Two images from one file. `broker` holds no torch and stays small; `worker` holds the engine.
#
#   docker build --target broker -t haulier-broker .
#   docker build --target worker -t haulier-worker .
#
# TORCH is what pip is given: a pinned version, with options where another index is wanted, for example
# --build-arg TORCH='torch==2.13.0+cpu --extra-index-url URL' for an image without CUDA's libraries.
ARG PYTHON_IMAGE=python:3.11-slim

FROM ${PYTHON_IMAGE} AS base
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# the folders exist before the volumes do: a new named volume takes their owner, so nothing has to run as root
RUN useradd --uid 10001 --create-home --shell /usr/sbin/nologin haulier \
 && install -d -o haulier -g haulier -m 0700 /var/lib/haulier /var/lib/haulier/state /var/lib/haulier/keys \
 && install -d -o haulier -g haulier /var/lib/haulier/cache
ENV HAULIER_CACHE=/var/lib/haulier/cache HAULIER_KEYS=/var/lib/haulier/keys HAULIER_STATE=/var/lib/haulier/state
WORKDIR /opt/haulier

# what is needed comes before what changes: a new line of code builds in seconds, since the layers above it stay
FROM base AS worker
ARG TORCH=torch==2.13.0
RUN pip install ${TORCH}
ARG EXTRAS=worker
COPY pyproject.toml ./
RUN touch README.md LICENSE && pip install ".[${EXTRAS}]" && pip uninstall --yes haulier
COPY README.md LICENSE ./
COPY common common
COPY ring ring
COPY broker broker
COPY worker worker
RUN pip install --no-deps .
USER haulier
ENTRYPOINT ["haulier"]

FROM base AS broker
COPY pyproject.toml ./
RUN touch README.md LICENSE && pip install ".[http]" && pip uninstall --yes haulier
COPY README.md LICENSE ./
COPY common common
COPY ring ring
COPY broker broker
COPY worker worker
RUN pip install --no-deps .
USER haulier
EXPOSE 7700 8000
ENTRYPOINT ["haulier"]
