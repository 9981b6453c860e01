"""The two deployments of a model on Ray Serve, and their Ray options."""

from __future__ import annotations

from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, RequestRouterConfig

from penstock.ray.door import Door
from penstock.ray.engine import Engine
from penstock.ray.router import PrefixRouter
from penstock.ray.settings import RaySettings

HEALTH_PERIOD_S, HEALTH_TIMEOUT_S = 10.0, 30.0
DOOR_REQUESTS = 4096  # at a time


def build(given: dict[str, Any], engine: type[Any] = Engine) -> serve.Application:
    settings = RaySettings.read(given)
    engines = serve.deployment(
        engine,
        name="engine",
        max_ongoing_requests=settings.max_requests,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.num_gpus},
        # All ranks of an engine are on one node, or it does not start.
        placement_group_bundles=[settings.bundle],
        placement_group_strategy="STRICT_PACK",
        autoscaling_config=AutoscalingConfig(
            min_replicas=settings.min_replicas,
            initial_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            upscale_delay_s=settings.upscale_delay,
            downscale_delay_s=settings.downscale_delay,
            look_back_period_s=10.0,
            policy=AutoscalingPolicy(
                policy_function="penstock.ray.router:QueuedTokens",
                policy_kwargs={"queued_tokens": settings.queued_tokens},
            ),
        ),
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),
        health_check_period_s=HEALTH_PERIOD_S,
        health_check_timeout_s=HEALTH_TIMEOUT_S,
        # Ray sends no new requests to an engine that it stops, and waits this long for running
        # ones.
        graceful_shutdown_timeout_s=settings.drain_timeout,
        graceful_shutdown_wait_loop_s=0.5,
    ).bind(settings)
    doors = serve.deployment(
        Door,
        name="door",
        num_replicas=settings.doors,
        max_ongoing_requests=DOOR_REQUESTS,
        ray_actor_options=settings.door_options,
        graceful_shutdown_timeout_s=settings.drain_timeout,
    )
    application: serve.Application = doors.bind(engines)
    return application
