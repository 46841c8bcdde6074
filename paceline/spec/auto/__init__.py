"""`auto`: which drafters are asked and which nodes are verified, by measured cost and measured acceptance."""
