"""Redhare's connector on a machine without an accelerator, as a module path names it: only events differ."""

from redhare.vllm_connector import RedhareConnector

from tests.connectors.servers.cpu import use_cpu

__all__ = ["RedhareConnector"]

use_cpu()
