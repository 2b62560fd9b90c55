"use strict";
// sorts a table by the column whose heading is pressed

function sortable(table) {
  const rows = [...table.tBodies[0].rows];
  for (const [column, heading] of [...table.tHead.rows[0].cells].entries()) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...heading.childNodes);
    heading.append(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => sortBy(table, rows, column));
  }
}

function sortBy(table, rows, column) {
  const headings = [...table.tHead.rows[0].cells];
  const sign = headings[column].getAttribute("aria-sort") === "ascending" ? -1 : 1;
  headings.forEach((heading) => heading.setAttribute("aria-sort", "none"));
  headings[column].setAttribute("aria-sort", sign === 1 ? "ascending" : "descending");
  // the first column has no numbers: it brings back the order of the report
  const number = (row, place) => (column === 0 ? place : parseFloat(row.cells[column].dataset.sort));
  const keyed = rows.map((row, place) => [number(row, place), place, row]);
  keyed.sort(([a, i], [b, j]) => isNaN(a) - isNaN(b) || sign * (a - b) || i - j);
  table.tBodies[0].append(...keyed.map(([, , row]) => row));
}

document.querySelectorAll("table.sortable").forEach(sortable);
