interface Window { trimtabTimeline?: {first: import("./timeline.mjs").Timeline} }
