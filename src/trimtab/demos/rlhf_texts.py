"""Texts of the RLHF demo, in English and in Chinese."""

from __future__ import annotations

# By key: English, Chinese.
TEXTS: dict[str, tuple[str, str]] = {
    "connected": ("Ray: {how}", "Ray 连接：{how}"),
    "fits": (
        "The cluster has {cpu:g} CPU and {memory:.1f} GiB free: the demo runs in its full size (7 CPU, 6 GiB).",
        "集群空闲 {cpu:g} CPU / {memory:.1f} GiB：按默认规格运行（7 CPU / 6 GiB）。",
    ),
    "shrunk": (
        "The cluster has {cpu:g} CPU and {memory:.1f} GiB free, less than 7 CPU, 6 GiB: sizes shrink to {share:.0%}.",
        "集群空闲 {cpu:g} CPU / {memory:.1f} GiB，不足 7 CPU / 6 GiB：规格按比例缩小到 {share:.0%}。",
    ),
    "pool_made": ("pool {pool}: {reason}", "资源池 {pool}：{reason}"),
    "warm": (
        "{count} processes are warm: tasks without own Ray options start in one of them.",
        "已有 {count} 个预热进程：不带专属 Ray 选项的任务会直接在其中启动。",
    ),
    "not_warm": (
        "Only {count} processes are warm yet: starts take longer.",
        "只有 {count} 个预热进程就绪：启动会慢一些。",
    ),
    "scene_1": ("\n=== Scene 1: rollouts start (dynamic slots) ===", "\n=== 场景 1: Rollout 角色启动（动态 PG） ==="),
    "scene_2": (
        "\n=== Scene 2: reward arrives (high priority, reserved slot) ===",
        "\n=== 场景 2: Reward 角色到达（高优运行） ===",
    ),
    "scene_3": ("\n=== Scene 3: train falls back to preemption ===", "\n=== 场景 3: Train 回退抢占 ==="),
    "scene_4": (
        "\n=== Scene 4: more rollouts, which preempt automatically ===",
        "\n=== 场景 4: Rollout 扩容触发自动抢占 ===",
    ),
    "scene_clean_up": (
        "\n=== Clean-up: evicted tasks return as others leave ===",
        "\n=== 清理阶段: 其他任务离开后，被抢占的任务恢复 ===",
    ),
    "scene_two_pools": (
        "\n=== Scene 5: two pools, cross-pool preemption ===",
        "\n=== 场景 5: 两个资源池与跨池抢占 ===",
    ),
    "scene_end": ("\n=== The end: shutdown ===", "\n=== 结束: 关闭调度器 ==="),
    "submitted": ("submit {task}: success={success}", "提交 {task}: success={success}"),
    "submitted_slot_path": (
        "  submit {task} (slot path): success={success}",
        "  提交 {task} (PG 优先): success={success}",
    ),
    "submitted_preempting": (
        "submit {task} (may preempt): success={success}",
        "提交 {task} (传统抢占): success={success}",
    ),
    "runs_in": ("    runs in {how}; {reason}", "    运行于{kind}（{how}）；{reason}"),
    "kind_host": ("a host", "预热进程"),
    "kind_actor": ("a plain Ray actor", "普通 Ray Actor"),
    "kind_None": ("(ended)", "（已离开）"),
    "because": ("    because {reason}", "    原因：{reason}"),
    "ran": ("{task} worker.run(): {steps} steps", "{task} worker.run()：完成 {steps} 步"),
    "rollouts_dynamic": (
        "both rollouts have dynamic slots; the two reserved ones are idle",
        "两个 Rollout 使用动态 PG，两个预留 PG 空闲",
    ),
    "reward_reserved": (
        "reward has a reserved slot, and no task was evicted: {reason}",
        "Reward 使用预留 PG，没有触发抢占：{reason}",
    ),
    "refused_for_quota": (
        "the slot path refuses it without affecting other tasks: {reason}",
        "PG 路径拒绝，且不影响任何任务：{reason}",
    ),
    "falls_back": ("  It is submitted again with preemption allowed.", "  改用允许抢占的提交方式。"),
    "dry_run": ("    a dry run would evict: {victims}", "    预演（不执行）将抢占：{victims}"),
    "victim_is_a_rollout": ("evicted: {victims}, a rollout", "被抢占：{victims}（Rollout）"),
    "why_not_reward": (
        "    Why not reward-00, which the original of this scene evicts: the quota lacks {lacks:g} CPU, and one\n"
        "    rollout frees {rollout:g}. reward-00 frees {reward:g}, but has priority 8.5 against 3: the cheapest\n"
        "    sufficient task is evicted.",
        "    为什么不是原场景中的 reward-00：配额只差 {lacks:g} CPU，一个 Rollout 即可释放 {rollout:g} CPU；\n"
        "    reward-00 能释放 {reward:g} CPU，但优先级是 8.5 而不是 3。抢占足够且代价最小的任务。",
    ),
    "which_rollout": (
        "    Of two rollouts of the same priority, the task whose eviction loses less work is evicted.",
        "    两个同优先级的 Rollout 中，选择损失工作量更少的一个。",
    ),
    "victim": ("evicted: {victims}", "被抢占：{victims}"),
    "after_rollouts": ("after the rollouts", "Rollout 启动后"),
    "after_reward": ("after reward", "Reward 到达后"),
    "after_train": ("after train", "Train 启动后"),
    "after_growth": ("after the growth", "Rollout 扩容后"),
    "after_clean_up": ("after the clean-up", "清理后"),
    "stats": (
        "  [{when}] running {running}; slots {total_pgs}: reserved {high_priority_pgs}, dynamic {dynamic_pgs}, "
        "taken {allocated_pgs}, idle {available_pgs}; reused {total_reuse_count}, destroyed {total_destroyed_count}",
        "  [{when}] 运行任务 {running}；PG {total_pgs} 个：预留 {high_priority_pgs}，动态 {dynamic_pgs}，"
        "占用 {allocated_pgs}，空闲 {available_pgs}；复用 {total_reuse_count} 次，销毁 {total_destroyed_count} 个",
    ),
    "preemptions": ("total_preemptions = {total}", "total_preemptions = {total}"),
    "completed": ("complete {task}", "完成 {task}"),
    "came_back": ("{task} runs again", "{task} 恢复运行"),
    "state_kept": (
        "{name} has the {before} steps it had done before, and goes on: {steps}",
        "{name} 保留了之前的 {before} 步并继续：{steps}",
    ),
    "deleted": ("delete {task} with its slot", "删除 {task} 及其 PG"),
    "reused_and_destroyed": (
        "slots were reused as tasks changed, and destroyed with their deleted agents",
        "任务更替时 PG 得到复用，删除 Agent 时 PG 被销毁",
    ),
    "too_many_nodes": (
        "  Skipped: it would have to fill every node, and there are more than {most}.",
        "  跳过：需要占满每个节点，而节点多于 {most} 个。",
    ),
    "filled": (
        "pool research fills the nodes with {count} tasks of {cpu:g} CPU, priority 2",
        "资源池 research 用 {count} 个 {cpu:g} CPU、优先级 2 的任务占满节点",
    ),
    "cross_off": (
        "cross-pool preemption off: urgent-00 (production, priority 9) is refused, research runs on: {reason}",
        "跨池抢占关闭：urgent-00（production，优先级 9）被拒绝，research 不受影响：{reason}",
    ),
    "cross_protected": (
        "on, but research is protected: refused as well, research runs on: {reason}",
        "跨池抢占开启但 research 受保护：同样被拒绝，research 不受影响：{reason}",
    ),
    "cross_on": ("on: urgent-00 runs; evicted: {victims}", "跨池抢占开启：urgent-00 运行；被抢占：{victims}"),
    "cross_counted": (
        "total_preemptions = {total}, cross_pool_preemptions = {across}",
        "total_preemptions = {total}，cross_pool_preemptions = {across}",
    ),
    "nothing_left": (
        "no placement group and no actor is left (left: {left})",
        "没有遗留的 PG 或 Actor（遗留：{left}）",
    ),
    "all_as_said": ("\nAll {count} checks passed.", "\n全部 {count} 项检查通过。"),
    "not_as_said": ("\n{count} checks failed (marked ✗).", "\n{count} 项检查未通过（标记为 ✗）。"),
}
