"""What the server tells about itself: metrics, the live page, the estimate of time saved."""
