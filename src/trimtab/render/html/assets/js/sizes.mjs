/* Sizes in pixels, and what the marks of a kind mean. */

export const AXIS_PX = 20, LANE_PX = 20, NODE_PX = 19;
export const BAD = new Set(["lost", "evicted", "rollback"]), GOOD = new Set(["joined", "arrived"]);
