"""These tests start a Ray cluster; others need none."""
