// Without scripts the block can still be selected; the button appears only where the clipboard is available.
for (const box of document.querySelectorAll(".copy")) {
  if (!navigator.clipboard) break;
  const block = /** @type {HTMLElement} */ (box.querySelector("pre"));
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = "Copy";
  button.setAttribute("aria-live", "polite");
  button.addEventListener("click", () => navigator.clipboard.writeText(block.textContent || "").then(
    () => { button.textContent = "Copied"; setTimeout(() => { button.textContent = "Copy"; }, 1500); },
    () => { getSelection()?.selectAllChildren(block); }));
  box.append(button);
}
