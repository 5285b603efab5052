"""`paceline ui`: a live page over a folder of run directories; reads them through `monitor`, and writes nothing."""
