# Three images:
#   service   lends sandboxes to others (docs/sandbox-service.md); what `docker compose up` runs
#   agentenv  the toolkit, for a machine that has Docker but no Python environment (see compose.yaml)
#   sandbox   where the commands of SWE tasks run; agentenv builds it by itself when it is first needed
#
#   docker build --target agentenv -t agentenv/toolkit .

ARG PYTHON_IMAGE=python:3.12-slim

FROM ${PYTHON_IMAGE} AS service
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
WORKDIR /opt/agentenv
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[service,docker]"
ENV PYTHONUNBUFFERED=1
EXPOSE 8700
CMD ["agentenv", "sandbox", "serve", "--host", "0.0.0.0", "--token-file", "/run/secrets/sandbox_tokens"]

FROM ${PYTHON_IMAGE} AS agentenv
# pip reads these two, so that a build can be pointed at another index, such as one with CPU builds of torch.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG EXTRAS=train,docker,service
WORKDIR /opt/agentenv
COPY . .
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"
ENV OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
CMD ["agentenv", "list"]

# agentenv_envs/swe/sandbox/images.py holds this stage, too; a test compares them.
FROM python:3.12-slim AS sandbox
RUN apt-get update \
 && apt-get install -y --no-install-recommends git patch procps \
 && rm -rf /var/lib/apt/lists/* \
 && pip install --no-cache-dir "pytest>=7.2,<8" setuptools wheel \
 && python -m compileall -q -x "/test/|/lib2to3/" /usr/local/lib/python3.12 \
 && git config --system user.name agent && git config --system user.email agent@localhost \
 && git config --system init.defaultBranch main && git config --system safe.directory "*" \
 && mkdir -p /work /testbed
ENV LANG=C.UTF-8 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /work
CMD ["bash"]
