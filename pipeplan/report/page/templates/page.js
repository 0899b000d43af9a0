"use strict";
// Tooltips are for a mouse alone: what is tapped is told below its picture, too.
for (const figure of document.querySelectorAll("figure")) {
  const told = figure.querySelector(".told");
  if (!told) continue;
  const tell = (event) => {
    const block = event.target.closest(".block");
    if (!block) return;
    figure.querySelector(".chosen")?.classList.remove("chosen");
    block.classList.add("chosen");
    told.textContent = block.title;
  };
  figure.addEventListener("click", tell);
}
