"""What a training costs before it is begun: seconds, bytes and node hours by the α-β model."""
