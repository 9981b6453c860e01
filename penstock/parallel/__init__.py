"""One model over several devices: who keeps what (`share`), how ranks talk (`ranks`, `links`)."""
