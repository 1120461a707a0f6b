# An image of jaxdp. Its entry point is the command `jaxdp`.
#
#   docker build -t jaxdp .                            on CPUs
#   docker build -t jaxdp --build-arg EXTRA=cuda13 .   on NVIDIA GPUs; cuda12 for older drivers
ARG BASE=python:3.12-slim

FROM ${BASE} AS build
ARG EXTRA=
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
WORKDIR /src
RUN python3 -m venv /opt/jaxdp
# The packages that jaxdp needs: a layer that is built again only if pyproject.toml changes.
COPY pyproject.toml ./
RUN mkdir jaxdp configs && touch README.md LICENSE && echo '__version__ = "0"' > jaxdp/__init__.py \
    && /opt/jaxdp/bin/pip install ".${EXTRA:+[$EXTRA]}"
COPY README.md LICENSE ./
COPY configs configs
COPY jaxdp jaxdp
RUN /opt/jaxdp/bin/pip install --no-deps --force-reinstall . && /opt/jaxdp/bin/jaxdp --version

FROM ${BASE}
COPY --from=build /opt/jaxdp /opt/jaxdp
RUN useradd --create-home --uid 1000 jaxdp && mkdir /work && chown jaxdp /work
ENV PATH=/opt/jaxdp/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/work/.cache \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /work
# Without a shell, so that SIGTERM reaches jaxdp, which saves a checkpoint and exits with 75.
ENTRYPOINT ["jaxdp"]
CMD ["--help"]
